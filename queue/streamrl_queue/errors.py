"""Every error that streamrl raises on purpose, by the boundary where it arises.

    StreamRLError
    ├── ConfigError               a configuration that cannot work
    ├── SchemaError               data that does not fit its declared columns
    │   └── RewardError           a reward or advantage that is not a finite number
    ├── QueueError                the queue refuses, with its state unchanged
    │   ├── LeaseExpired          the caller no longer holds what it writes to
    │   ├── SessionLost           the broker does not know the caller's session (any more)
    │   ├── QueueFull             back-pressure outlasted the caller's deadline
    │   ├── UnknownName           a row, stage, session, lease or version that does not exist
    │   ├── StepConflict          a commit or retire that contradicts an earlier one
    │   ├── VersionConflict       a version that was used before or never begun
    │   └── JournalError          the disk holds something that cannot be trusted
    ├── TransportError            bytes did not arrive as they were sent, or not in time
    │   ├── ProtocolError         malformed, foreign or tampered message
    │   ├── AuthError             missing or wrong key
    │   ├── AddressError          an address that cannot be bound
    │   ├── MessageTooLarge       refused by the sender, before sending
    │   └── DeadlineExceeded      says what was awaited, from whom and for how long
    ├── EngineError               an inference engine refused, failed or vanished
    ├── WeightError               a weight transfer that cannot be proved
    ├── AgentError                an episode failed; becomes a row's status, never a crash of the run
    │   ├── EnvironmentFailed     the environment's own code raised
    │   ├── ToolFailed            a tool raised or ran out of time
    │   ├── TemplateError         a chat template that cannot be followed token-exactly
    │   └── LimitReached          a turn, token or time budget of the episode ran out
    ├── NoProgress                steps go by and nothing can be learned
    └── RoleFailed                a supervised process ended in a way that its policy does not forgive

Errors cross the wire by class name and message; `from_wire` gives back the same class. Nothing is ever
classified by matching the text of a message.
"""

from __future__ import annotations


class StreamRLError(Exception):
    """Base of all errors that streamrl raises on purpose."""


class ConfigError(StreamRLError):
    """A configuration that cannot work: names the field, what was expected, what came, what to do."""


class SchemaError(StreamRLError):
    """Data that does not fit its declared columns."""


class RewardError(SchemaError):
    """A reward or advantage that is not a finite number."""


class QueueError(StreamRLError):
    """The queue refuses a request; its state is unchanged."""


class LeaseExpired(QueueError):
    """The caller no longer holds the rows it writes to."""


class SessionLost(QueueError):
    """The broker does not know the caller's session: it expired, or the broker restarted. Say Hello again."""


class QueueFull(QueueError):
    """Back-pressure outlasted the caller's deadline; nothing was stored."""


class UnknownName(QueueError):
    """A row, stage, session, lease or version that does not exist."""


class StepConflict(QueueError):
    """A commit or retire that contradicts an earlier one."""


class VersionConflict(QueueError):
    """A version id that was used before, was never begun, or is out of order."""


class JournalError(QueueError):
    """The journal holds something that cannot be trusted, or cannot be written."""


class TransportError(StreamRLError):
    """Bytes did not arrive as they were sent, or not in time."""


class ProtocolError(TransportError):
    """A malformed, foreign or tampered message."""


class AuthError(TransportError):
    """A missing or wrong key."""


class AddressError(TransportError):
    """An address that cannot be bound or is not allowed."""


class MessageTooLarge(TransportError):
    """The sender refuses a message above its limit, before sending anything."""


class DeadlineExceeded(TransportError):
    """A wait ran out. The message says what was awaited, from whom and for how long."""

    @classmethod
    def waiting(cls, what: str, source: str, seconds: float) -> DeadlineExceeded:
        return cls(f"waited {seconds:.1f} s for {what} from {source}; nothing came")


class EngineError(StreamRLError):
    """An inference engine refused, failed or vanished."""


class WeightError(StreamRLError):
    """A weight transfer that cannot be proved to have arrived."""


class AgentError(StreamRLError):
    """An episode failed. It becomes the status of its row, never a crash of the run."""


class EnvironmentFailed(AgentError):
    """The environment's own code raised."""


class ToolFailed(AgentError):
    """A tool raised or ran out of time."""


class TemplateError(AgentError):
    """A chat template that cannot be followed token-exactly."""


class LimitReached(AgentError):
    """A turn, token or time budget of the episode ran out."""


class NoProgress(StreamRLError):
    """Steps go by and nothing can be learned from them."""


class RoleFailed(StreamRLError):
    """A supervised process ended in a way that its policy does not forgive."""


def _tree(root: type[StreamRLError]) -> dict[str, type[StreamRLError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def from_wire(name: str, message: str) -> StreamRLError:
    """The error that a peer sent as class name and message; an unknown name becomes a plain StreamRLError."""
    kind = _tree(StreamRLError).get(name)
    return kind(message) if kind else StreamRLError(f"{name}: {message}")
