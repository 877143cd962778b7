"""One batched fact for each host, read as rarely as the truth allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from pyinfra import host, state
from pyinfra.api.host import Host

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class PerHost(Generic[Question, Answer]):
    """`ask` says once per host and run what to look at; `answer` is about the host that pyinfra is at.

    It is read again when the phase changed or an operation of this run changed that host, so a converged deploy pays
    for one read in each phase however many operations look.
    """

    def __init__(self, read: Callable[[Question], Answer]) -> None:
        self._read = read
        self._questions: WeakKeyDictionary[Host, Question] = WeakKeyDictionary()
        self._answers: WeakKeyDictionary[Host, tuple[object, Answer]] = WeakKeyDictionary()

    def ask(self, question: Question) -> None:
        self._questions[_this_host()] = question

    def answer(self) -> Answer:
        moment = (state.current_stage, _changes())
        known = self._answers.get(_this_host())
        if known is None or known[0] != moment:
            known = self._answers[_this_host()] = (moment, self.read_now())
        return known[1]

    def read_now(self) -> Answer:
        """For an operation that looks at what its own commands did."""
        return self._read(self._questions[_this_host()])


def _changes() -> int:
    """How many operations have changed this host so far in this run."""
    metas = [op.operation_meta for op in state.ops[_this_host()].values()]
    return sum(1 for meta in metas if meta.is_complete() and meta.did_change())


def _this_host() -> Host:
    """The host behind pyinfra's context object."""
    return state.inventory.get_host(host.name)
