"""Shares of right drafts: of one sequence, and of all sequences of a drafter. Pure arithmetic.

A draft is judged only if all drafts before it in its proposal were right, so a proposal gives a verdict for each right draft and
one for the first wrong draft. Older verdicts fade. A sequence counts as usual until its own verdicts say otherwise.
"""

from __future__ import annotations

FIRST_PROBABILITY = 0.7
"""Probability that a draft is right, before anything is known."""
_FIRST_WEIGHT = 2.0  # verdicts that equal the first assumption
_USUAL_MEMORY = 0.99  # about a hundred verdicts of all sequences count
_OWN_MEMORY = 0.97  # about thirty verdicts of one sequence count
_PASS_MEMORY = 0.9  # about ten right drafts count for the share that was in the pass
_USUAL_WEIGHT = (
    8.0  # own verdicts that equal the usual share; with fewer, the best of many sequences would only be lucky
)
_FIRST_WAIT, _LAST_WAIT = 8, 1024  # rows without drafts before a trial


def expected_tokens(worth: float, num_drafts: int) -> float:
    """Return the expected tokens of drafts, each of which wins a token with probability `worth` if all before it do."""
    return worth * (1 - worth**num_drafts) / (1 - worth) if worth < 1 else float(num_drafts)


class UsualAcceptance:
    """The share of right drafts of all sequences: the assumption for a new sequence, kept from request to request."""

    def __init__(self, initial: float = FIRST_PROBABILITY) -> None:
        self._num_right, self._num_verdicts = initial * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def probability(self) -> float:
        """Probability that a draft is right if all before it are."""
        return self._num_right / self._num_verdicts

    def observe(self, num_drafts: int, num_right: int) -> None:
        """Learn from a proposal whose first `num_right` drafts were right."""
        num_verdicts = num_right + (num_right < num_drafts)
        fade = _USUAL_MEMORY**num_verdicts
        self._num_right = self._num_right * fade + num_right
        self._num_verdicts = self._num_verdicts * fade + num_verdicts


class Acceptance:
    """The share of right drafts of one sequence, and the time of its next trial. usual: of all sequences.

    A draft wins a token if it is right and in the pass. The drafter makes it right; a constraint whose masks take too long may
    keep it out of the pass.
    """

    __slots__ = ("_num_in_pass", "_num_right", "_num_verdicts", "_num_wanted", "_num_without", "_usual", "_wait")

    def __init__(self, usual: UsualAcceptance) -> None:
        self._usual = usual
        self._num_right = self._num_verdicts = 0.0
        self._num_in_pass = self._num_wanted = _FIRST_WEIGHT  # of right drafts
        self._num_without, self._wait = 0, _FIRST_WAIT

    @property
    def probability(self) -> float:
        """Probability that a draft is right if all before it are."""
        num_right = self._num_right + _USUAL_WEIGHT * self._usual.probability
        return num_right / (self._num_verdicts + _USUAL_WEIGHT)

    @property
    def worth(self) -> float:
        """Tokens that a draft wins if all before it do: the probability that it is right and in the pass."""
        return self.probability * self._num_in_pass / self._num_wanted

    def expected(self, num_drafts: int) -> float:
        """Return the expected tokens of `num_drafts` drafts."""
        return expected_tokens(self.worth, num_drafts)

    def observe(self, num_drafts: int, num_right: int, num_accepted: int | None = None) -> None:
        """Learn from a proposal; drafts after the first wrong one say nothing.

        num_drafts: drafts at which a token was drawn. num_accepted: right drafts that were in the pass; None: all. At most one
        right draft can be known to have been left out, since nothing is drawn after it.
        """
        num_accepted = num_right if num_accepted is None else num_accepted
        num_verdicts = num_right + (num_right < num_drafts)
        fade = _OWN_MEMORY**num_verdicts
        self._num_right = self._num_right * fade + num_right
        self._num_verdicts = self._num_verdicts * fade + num_verdicts
        fade = _PASS_MEMORY**num_right
        self._num_in_pass = self._num_in_pass * fade + num_accepted
        self._num_wanted = self._num_wanted * fade + num_right
        self._usual.observe(num_drafts, num_right)
        if num_accepted == num_drafts > 0:
            self._wait = max(_FIRST_WAIT, self._wait // 8)

    def note_plain(self, num_rows: int) -> None:
        """Count rows without drafts."""
        self._num_without += num_rows

    @property
    def is_due(self) -> bool:
        """Whether it is time for a trial."""
        return self._num_without >= self._wait

    def note_trial(self) -> None:
        """Note a trial; the wait for the next one doubles."""
        self._num_without, self._wait = 0, min(_LAST_WAIT, 2 * self._wait)

    def note_no_proposal(self) -> None:
        """Note that the drafter had no proposal to try, which says nothing: the next trial is soon."""
        self._num_without, self._wait = 0, _FIRST_WAIT

    def note_drafts(self) -> None:
        """Note a row that gets drafts because they pay."""
        self._num_without, self._wait = 0, _FIRST_WAIT
