"""What a reply says must be true of the journal at the moment it leaves: one function for each kind of request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import trio

from streamrl_queue import events as e
from streamrl_queue import messages as m
from streamrl_queue.batches import decode
from streamrl_queue.transport import Buffer

from .model import Broken, Model

# The longest that a reply waits in the broker, behind a slow sync.
ON_ITS_WAY_SECONDS: Final = 0.5


def facts(event: e.Event) -> list[object]:
    """What the event makes true, as keys that `promised` names too."""
    match event:
        case e.Put(keys=keys):
            return [("put", key) for key in keys]
        case e.Written() | e.Ended():
            return [(event.lease, event.rows)]
        case e.Dropped(rows=rows):
            return [("dropped", row) for row in rows]
        case e.Committed(step=step):
            return [("step", step)]
        case e.VersionCommitted(version=version):
            return [("version", version)]
        case e.Reconciled():
            return ["reconciled"]
    return []


def promised(request: Any, reply: Any) -> list[object]:
    """What an acknowledgement of the request promises to survive."""
    match request:
        case m.PutTasks(keys=keys):
            return [("put", key) for key in keys]
        case m.WriteColumns(lease=lease) | m.Release(lease=lease):
            return [(lease, reply.rows)]
        case m.Drop():
            return [("dropped", row) for row in reply.rows]
        case m.CommitStep(step=step):
            return [("step", step)]
        case m.CommitVersion(version=version):
            return [("version", version)]
        case m.Reconcile():
            return ["reconciled"]
    return []


def put(model: Model, session: str, request: m.PutTasks, reply: m.Receipt) -> None:
    groups = [model.keys.get(key) for key in request.keys]
    rows = tuple(row.id for group in groups if group for row in group.rows)
    if rows != reply.rows:
        raise Broken(f"put of {request.keys} was acknowledged as rows {reply.rows}; journaled are {rows}", reply.rows)


def lease(model: Model, session: str, request: m.LeaseRows, reply: m.Grant) -> None:
    if not reply.rows:
        return
    ids = {keys.row for keys in reply.rows}
    lease = model.leases.get(reply.lease)
    if lease is None or lease.session != session or lease.stage != request.stage or not ids <= set(lease.granted):
        raise Broken(f"{session} was told of lease {reply.lease} with rows {sorted(ids)}, which is not journaled", ids)
    if reply.version not in model.versions and reply.version:
        raise Broken(f"lease {reply.lease} names version {reply.version}, which does not exist", ids)
    for keys in reply.rows:
        row = model.rows[keys.row]
        if (keys.group, keys.member, keys.split) != (row.group.id, row.member, row.split):
            raise Broken(f"lease {reply.lease} describes {row} as {keys}", ids)
        if row.held.get(lease.stage) == lease.id and keys.attempt != row.attempts[lease.stage]:
            raise Broken(f"row {row.id} is told to be attempt {keys.attempt}, is {row.attempts[lease.stage]}", [row.id])


def write(model: Model, session: str, request: m.WriteColumns, reply: m.Receipt) -> None:
    lease = model.leases.get(request.lease)
    if lease is None or lease.session != session:
        raise Broken(f"a write of {session} to lease {request.lease}, not its own, was accepted", reply.rows)
    for id in reply.rows:
        if model.rows[id].done.get(lease.stage) != lease.id:
            raise Broken(f"a write of row {id} under lease {lease.id} was acknowledged but is not journaled", [id])


def release(model: Model, session: str, request: m.Release, reply: m.Receipt) -> None:
    lease = model.leases[request.lease]
    if held := set(reply.rows) & lease.rows:
        raise Broken(f"rows {sorted(held)} were given back, but lease {request.lease} still holds them", held)
    if lost := set(reply.rows) - lease.released:
        raise Broken(f"rows {sorted(lost)} were given back, which was taken for a loss", lost)


def drop(model: Model, session: str, request: m.Drop, reply: m.Receipt) -> None:
    if alive := [id for id in reply.rows if model.rows[id].end is None]:
        raise Broken(f"rows {alive} were dropped, but are alive", alive)


def begin_version(model: Model, session: str, request: m.BeginVersion, reply: m.Number) -> None:
    version = model.versions.get(reply.value)
    if version is None or version.step != request.step:
        raise Broken(f"version {reply.value} was handed out for step {request.step} but is not journaled")


def commit_version(model: Model, session: str, request: m.CommitVersion, reply: m.Number) -> None:
    version = model.versions.get(request.version)
    if version is None or not version.committed:
        raise Broken(f"version {request.version} was acknowledged as committed but is not journaled")


def commit(model: Model, session: str, request: m.CommitStep, reply: m.Receipt) -> None:
    if set(model.steps.get(request.step, ())) != set(request.rows):
        raise Broken(f"step {request.step} was acknowledged but is not journaled", request.rows)


def retire(model: Model, session: str, request: m.Retire, reply: m.Number) -> None:
    if model.retired_through < request.through:
        raise Broken(f"steps to {request.through} were acknowledged as retired; those to {model.retired_through} are")


def reconcile(model: Model, session: str, request: m.Reconcile, reply: m.Number) -> None:
    if model.step != request.step:
        raise Broken(f"reconcile to step {request.step} was acknowledged; the step is {model.step}")


def members(model: Model, session: str, request: m.Members, reply: m.Membership) -> None:
    for member in reply.members:
        announced, since = model.fences.get(member.session, (-1, 0.0))
        # A reply may have been decided just before.
        if member.ready and member.announced <= announced and since + ON_ITS_WAY_SECONDS < trio.current_time():
            raise Broken(f"{member.name} is shown as ready, but its announcement {member.announced} was fenced")


def refused_write(model: Model, session: str, request: m.WriteColumns, payload: Buffer, message: str) -> None:
    """A lease's holder is not sent away, nor is one that repeats a write."""
    lease = model.leases.get(request.lease)
    rows = decode(payload, "write").column("row").to_pylist()
    if lease is not None and lease.session == session:
        known = [model.rows[id] for id in rows]
        if set(rows) <= lease.rows:
            raise Broken(f"the holder of lease {lease.id} was refused: {message}", rows)
        if all(row.done.get(lease.stage) == lease.id for row in known):
            raise Broken(f"a repeated write to lease {lease.id} was refused: {message}", rows)


CHECKS: Final[dict[type, Callable[[Model, str, Any, Any], None]]] = {
    m.PutTasks: put,
    m.LeaseRows: lease,
    m.WriteColumns: write,
    m.Release: release,
    m.Drop: drop,
    m.BeginVersion: begin_version,
    m.CommitVersion: commit_version,
    m.CommitStep: commit,
    m.Retire: retire,
    m.Reconcile: reconcile,
    m.Members: members,
}
