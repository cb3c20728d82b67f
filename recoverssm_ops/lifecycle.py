"""The life of a step's records: recorded once, committed once, before anything else happens to their slots."""

from collections.abc import Callable

from recoverssm_ops.records import Record


class StepLifecycle:
    """Makes an error of what would silently corrupt states: a step forgotten, committed twice, or made for capture only.

    ::

        o, record = kda_verify(...)  # of every layer
        steps.record_step(record, ...)
        ...  # acceptance
        steps.commit_step(lambda *records: ...)  # kda_commit of every layer

    Where verify or commit is the replay of a CUDA graph there are no new :class:`Record` objects: give
    :meth:`record_step` none, and replay the graph in the function given to :meth:`commit_step`.

    Host bookkeeping only; not for use inside compiled functions.
    """

    def __init__(self) -> None:
        self._count = 0  # steps recorded so far: the messages name a step by its number
        self._records: tuple[Record, ...] | None = None
        self._dummy = False

    @property
    def pending(self) -> bool:
        """Whether a step waits for its commit. A dummy step does not."""
        return self._records is not None and not self._dummy

    def require_idle(self, action: str) -> None:
        """Call before anything that changes who owns a slot: admission, release, preemption, copying states.

        A record belongs to the request that its slot had at verify. Committed to the slot's next owner, it would spoil it.

        Args:
            action: completes "cannot ..."; for the message.

        Raises:
            RuntimeError: a step is pending.
        """
        if self.pending:
            raise RuntimeError(
                f"cannot {action} while step {self._count} has records that are not committed: call commit_step first, "
                "or discard_step if none of its tokens are kept"
            )

    def record_step(self, *records: Record, dummy: bool = False) -> None:
        """A window was verified; ``records`` are those of its layers.

        Args:
            dummy: the step was run to warm up or capture, on no request's tokens. It cannot be committed, and needs no
                discarding.

        Raises:
            RuntimeError: the step before waits for its commit, or a record was committed already.
            TypeError: not a record.
        """
        self.require_idle("record another step")
        for record in records:
            if not isinstance(record, Record):
                raise TypeError(f"record_step takes records made by kda_verify, but got {type(record).__name__}")
            if record.committed:
                raise RuntimeError("record_step got a record that was committed already: run kda_verify again")
        self._count += 1
        self._records, self._dummy = records, dummy

    def commit_step(self, commit: Callable[..., object]) -> None:
        """Call ``commit(*records)`` for the pending step, once.

        If ``commit`` raises, the step stays pending and can be committed again. Operators refuse bad arguments before they
        write; a second try passes over the layers whose ``record.committed`` is set.

        Raises:
            RuntimeError: no step is pending, the step is a dummy, or ``commit`` left a record uncommitted (the step stays
                pending then, too).
        """
        if self._records is None:
            last = f"step {self._count} was committed or discarded already" if self._count else "no step was recorded"
            raise RuntimeError(f"commit_step has nothing to commit, {last}: run verify, then record_step")
        if self._dummy:
            raise RuntimeError(
                f"step {self._count} is a dummy step for warm-up or capture, and its records hold no request's tokens: "
                "run verify on real rows, then record_step, before commit_step"
            )
        commit(*self._records)
        left = [i for i, record in enumerate(self._records) if not record.committed]
        if left:
            raise RuntimeError(
                f"records {left} of step {self._count} (of {len(self._records)}) were not committed: the function given "
                "to commit_step should call kda_commit for every layer"
            )
        self._records = None

    def discard_step(self) -> None:
        """Drop the pending step: no token of it is kept, the checkpoints stay what they were.

        Raises:
            RuntimeError: no step is pending.
        """
        if not self.pending:
            raise RuntimeError("discard_step has nothing to discard: no step is waiting for its commit")
        self._records = None
