"""Combinations of pieces that mean nothing, or not what they say."""

from __future__ import annotations

from collections.abc import Iterator

from .base import tag_of
from .lags import lag_weights, lags_up_to
from .pieces import Algorithm, GeometricRejection, MaskedIS, SequenceRejection, SoftOverlong


def problems(algorithm: Algorithm, *, max_staleness: int, group_size: int) -> Iterator[str]:
    """One sentence for each contradiction: both keys, and what to do. Pure."""
    correction, loss, advantage = algorithm.correction, algorithm.loss, algorithm.advantage
    stale = f"queue.max_staleness: {max_staleness}"
    named = f"algorithm.correction: {tag_of(type(correction))}"
    if not correction.corrects and max_staleness > 0:
        yield (
            f"{named} with {stale}: rows up to {max_staleness} steps old would be trained as if they were fresh; use "
            "another correction (streamrl algorithms lists them), or max_staleness 0"
        )
    if loss.clips and correction.proximal == "current":
        yield (
            f"algorithm.loss: {tag_of(type(loss))} with {named}: its ratio is to the current policy and so always 1, "
            "and the clip would never act; use loss reinforce, or correction behaviour or decoupled"
        )
    if advantage.compares and group_size < 2:
        yield (
            f"algorithm.advantage: {tag_of(type(advantage))} with tasks.group_size: {group_size}: a group baseline "
            "needs group_size >= 2, or no row ever has an advantage; or use advantage reinforce_plus_plus"
        )
    if algorithm.normalise == "constant" and algorithm.normalise_length is None:
        yield "algorithm.normalise: constant needs algorithm.normalise_length (tokens per row); got null"
    if algorithm.normalise != "constant" and algorithm.normalise_length is not None:
        yield (
            f"algorithm.normalise_length: {algorithm.normalise_length} has no effect with "
            f"algorithm.normalise: {algorithm.normalise}; remove it or use constant"
        )
    yield from _bands(algorithm)
    length = algorithm.length
    if isinstance(length, SoftOverlong) and length.buffer_tokens > length.max_tokens:
        yield (
            f"algorithm.length.buffer_tokens: {length.buffer_tokens} is more than algorithm.length.max_tokens: "
            f"{length.max_tokens}; the penalty would start before a row does; lower the first"
        )


def reach(algorithm: Algorithm, *, max_lag: int) -> Iterator[str]:
    """One sentence for each piece that tokens of lag 0 to `max_lag` steps, and no others, give nothing to do. Pure."""
    bound = f"queue.max_staleness: {max_lag}"
    if max_lag == 0 and algorithm.loss.clips and algorithm.correction.proximal == "between":
        yield (
            f"algorithm.correction: {tag_of(type(algorithm.correction))} with {bound}: fresh tokens have no policy "
            "between theirs and the current one, and the loss's clip would never act; use correction behaviour"
        )
    if algorithm.lag is None:
        return
    if (lag_weights(algorithm.lag, lags_up_to(max_lag)) == 1).all():
        yield (
            f"algorithm.lag: {tag_of(type(algorithm.lag))} with {bound}: every token would weigh 1; remove it, or "
            "raise queue.max_staleness"
        )


def _bands(algorithm: Algorithm) -> Iterator[str]:
    for key, piece in (("correction", algorithm.correction), ("rejection", algorithm.rejection)):
        if isinstance(piece, MaskedIS | SequenceRejection | GeometricRejection) and not piece.low <= 1 <= piece.high:
            yield (
                f"algorithm.{key}.low: {piece.low} and algorithm.{key}.high: {piece.high}: expected 1 between them: "
                "the ratio of a fresh token is 1, and none would be trained"
            )
