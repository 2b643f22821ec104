"""How often drafts are right: of one sequence, and of all that a drafter has drafted for. Pure arithmetic.

A draft is judged only where all before it in its proposal were right, so a proposal gives a verdict for each right draft and
one for the first that is wrong. Older verdicts fade. A sequence is taken to be as all are until its own verdicts say otherwise.
"""

from __future__ import annotations

FIRST_PROBABILITY = 0.7
"""Probability that a draft is right, before anything is known."""
_FIRST_WEIGHT = 2.0  # verdicts that the first assumption counts as
_USUAL_MEMORY = 0.99  # of all sequences' verdicts: about a hundred count
_OWN_MEMORY = 0.97  # of a sequence's own: about thirty count
_PASS_MEMORY = 0.9  # of right drafts, whether they were in the pass
_USUAL_WEIGHT = 8.0  # of its own verdicts that what is usual counts as: of many sequences the best would only be lucky
_FIRST_WAIT, _LAST_WAIT = 8, 1024  # rows without drafts before a trial


def expected_tokens(worth: float, num_drafts: int) -> float:
    """Return how many tokens drafts win of which each wins one with this probability, if all before it do."""
    return worth * (1 - worth**num_drafts) / (1 - worth) if worth < 1 else float(num_drafts)


class UsualAcceptance:
    """How the drafts of all sequences have fared: what is assumed of each, kept from one request to the next."""

    def __init__(self, initial: float = FIRST_PROBABILITY) -> None:
        self._num_right, self._num_verdicts = initial * _FIRST_WEIGHT, _FIRST_WEIGHT

    @property
    def probability(self) -> float:
        """That a draft is right whose predecessors are."""
        return self._num_right / self._num_verdicts

    def observe(self, num_drafts: int, num_right: int) -> None:
        """Take in a proposal, whose first `num_right` drafts were right."""
        num_verdicts = num_right + (num_right < num_drafts)
        fade = _USUAL_MEMORY**num_verdicts
        self._num_right = self._num_right * fade + num_right
        self._num_verdicts = self._num_verdicts * fade + num_verdicts


class Acceptance:
    """How the drafts of one sequence have fared, and when it is tried again. usual: of all sequences.

    Whether a draft is right is the drafter's merit; whether a right one was in the pass may depend on a constraint, whose
    masks can take too long. Both have to be for it to win a token.
    """

    __slots__ = ("_num_in_pass", "_num_right", "_num_verdicts", "_num_wanted", "_num_without", "_usual", "_wait")

    def __init__(self, usual: UsualAcceptance) -> None:
        self._usual = usual
        self._num_right = self._num_verdicts = 0.0
        self._num_in_pass = self._num_wanted = _FIRST_WEIGHT  # of right drafts
        self._num_without, self._wait = 0, _FIRST_WAIT

    @property
    def probability(self) -> float:
        """That a draft is right whose predecessors are."""
        num_right = self._num_right + _USUAL_WEIGHT * self._usual.probability
        return num_right / (self._num_verdicts + _USUAL_WEIGHT)

    @property
    def worth(self) -> float:
        """Tokens that a draft wins whose predecessors do: where it is right, and in the pass."""
        return self.probability * self._num_in_pass / self._num_wanted

    def expected(self, num_drafts: int) -> float:
        """Return how many tokens so many drafts are expected to win."""
        return expected_tokens(self.worth, num_drafts)

    def observe(self, num_drafts: int, num_right: int, num_accepted: int | None = None) -> None:
        """Take in a proposal: drafts behind the first wrong one say nothing.

        num_drafts: those at which a token was drawn. num_accepted: of the right ones, those that were in the pass; None: all.
        One right draft at most can be known to have been left out, since nothing is drawn behind it.
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
        """Count rows that got no drafts."""
        self._num_without += num_rows

    @property
    def is_due(self) -> bool:
        """Whether it is time to try some drafts all the same."""
        return self._num_without >= self._wait

    def note_trial(self) -> None:
        """Note that drafts are tried; the next time takes twice as long to come."""
        self._num_without, self._wait = 0, min(_LAST_WAIT, 2 * self._wait)

    def note_no_proposal(self) -> None:
        """Note that the drafter had nothing to try: that says nothing, so that it is tried again soon."""
        self._num_without, self._wait = 0, _FIRST_WAIT

    def note_drafts(self) -> None:
        """Note a row that gets drafts since they pay."""
        self._num_without, self._wait = 0, _FIRST_WAIT
