"""The error family: every failure that the product foresees, with the exit code it ends a process with.

Text reads `<field=value is wrong>. <the rule>. <what to do: exact key or command>`. All of them
pickle. Rank processes and commands share the codes; a negative code is a signal.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a process says about itself when it ends."""

    DONE = 0
    USER_ERROR = 2  # config or other input: never retried
    FAILED = 3  # own fault: retried within the budget
    STOPPED = 4  # ended on request
    INTERRUPTED = 5  # state saved on a signal: resumable
    PEER_FAILED = 6  # a collective broke because another rank died: not blamed
    FENCED = 7  # lost its lease or its agent
    UNHEALTHY = 8  # the run's own numbers are bad and its rules say stop: never retried, it would end the same way


class PretrainError(Exception):
    """Base of the family. Message first; subclasses set the code."""

    exit_code: ExitCode = ExitCode.FAILED


class UserError(PretrainError):
    """Something that the user gave is wrong; trying again cannot help."""

    exit_code = ExitCode.USER_ERROR


class ConfigError(UserError):
    """All problems of a config at once, one line each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__(problems)
        self.problems = list(problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the config:\n{lines}"


class DataError(UserError):
    """A corpus, shard, index, manifest or tokenizer that is missing, damaged or unfit."""


class StoreError(PretrainError):
    """A read or write of the run's or the data's storage failed (disk full, permission, network)."""


class CheckpointError(UserError):
    """A checkpoint that is asked for is missing, damaged or does not fit the model."""


class RunError(UserError):
    """A run's name, directory or state does not allow what was asked."""


class LeaseHeldError(RunError):
    """Another process holds the run; the message names it."""


class FencedError(PretrainError):
    """This process lost the run to a newer attempt and must not publish anything."""

    exit_code = ExitCode.FENCED


class PeerFailedError(PretrainError):
    """A collective failed because another rank is gone."""

    exit_code = ExitCode.PEER_FAILED


class HealthError(PretrainError):
    """The run itself is ill: too many bad steps, or nowhere to go back to."""

    exit_code = ExitCode.UNHEALTHY
