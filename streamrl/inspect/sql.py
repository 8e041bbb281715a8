"""`streamrl sql RUN "select …"`: DuckDB over the tables of `tables.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from rich.console import Console

from streamrl_queue.errors import ConfigError

from .printing import print_csv, print_json, print_table
from .tables import read_tables


def sql(name: str, query: str | None, *, form: str) -> int:
    """Run `query` and print its result as `table`, `csv` or `json`; without a query, list the tables.

    Raises:
        ConfigError: DuckDB is not installed, or it refuses the query.
    """
    tables = read_tables(name)
    if query is None:
        names, lines = list_of(tables)
    else:
        names, lines = run(query, tables)
    if form == "json":
        print_json([dict(zip(names, line, strict=True)) for line in lines])
    elif form == "csv":
        print_csv(names, lines)
    else:
        console = Console()
        print_table(console, names, lines)
        console.print(f"{len(lines)} {'row' if len(lines) == 1 else 'rows'}", style="dim", highlight=False)
    return 0


def run(query: str, tables: Mapping[str, pa.Table]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and lines of the query's result.

    Raises:
        ConfigError: DuckDB is not installed, or it refuses the query.
    """
    try:
        import duckdb
    except ImportError:
        raise ConfigError("sql: needs DuckDB: pip install 'streamrl[inspect]'") from None
    # Names in a query mean our tables, never variables of this process.
    with duckdb.connect(":memory:", config={"python_enable_replacements": "false"}) as connection:
        for name, table in tables.items():
            connection.register(name, table)
        try:
            result = connection.execute(query)
            return [column[0] for column in result.description or ()], result.fetchall()
        except duckdb.Error as error:
            raise ConfigError(f"sql: {error}") from error


def list_of(tables: Mapping[str, pa.Table]) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Every column of every table."""
    lines = [(name, field.name, _sql_type(field.type)) for name, table in tables.items() for field in table.schema]
    return ["table", "column", "type"], lines


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return "map"
    return {"int64": "bigint", "int32": "integer", "double": "double", "string": "varchar", "bool": "boolean"}.get(
        str(kind), "timestamp" if pa.types.is_timestamp(kind) else str(kind)
    )
