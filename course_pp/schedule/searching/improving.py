"""Local improvement: move one letter of a word, keep the change if the makespan does not grow much.

Only what lies on the longest path can shorten the run, so a move takes a letter of a block of that path (what one rank
does in one go) past the block's end, or the block's last letter, for which another rank waits, further to the front
(Nowicki and Smutnicki 1996, "A fast taboo search algorithm for the job shop problem"). A change for the worse is
accepted within a threshold that falls to zero; then the next round starts from the best (Dueck and Scheuer 1990,
"Threshold accepting").
"""

from collections.abc import Callable
from random import Random

from course_pp.schedule.searching.problem import FORWARD, Pass, Problem, Words
from course_pp.schedule.span import Time

ROUND = 400
"""Tries from one fall of the threshold to the next."""


class Improver:
    """The best words so far, and the walk that looks for better ones.

    Attributes:
        best: the words with the least makespan yet.
        score: their makespan, and the sum of the ranks' ends.
        tries: how many words were simulated.
        last_gain: after how many tries the makespan last fell.
    """

    def __init__(self, problem: Problem, words: Words, seed: int) -> None:
        self.problem = problem
        self.random = Random(seed)
        self.best = [list(word) for word in words]
        run = problem.run(words)
        assert run is not None
        self.score = (run.makespan, run.total)
        self.tries = self.last_gain = 0

    def improve(self, enough: Time, patience: int, over: Callable[[], bool]) -> str:
        """Walk until the makespan is ``enough``, nothing was gained for ``patience`` tries, or time is ``over``.

        Returns:
            Which of the three it was: ``bound``, ``patience`` or ``time``.
        """
        began = self.tries
        while True:
            if self.score[0] <= enough:
                return "bound"
            if self.tries - began >= patience and self.tries - self.last_gain >= patience:
                return "patience"
            if over():
                return "time"
            self._walk(enough, over)

    def _walk(self, enough: Time, over: Callable[[], bool]) -> None:
        """One fall of the threshold, from the best words."""
        words = [list(word) for word in self.best]
        run = self.problem.run(words)
        assert run is not None
        shortest = float(min(t for t in self.problem.durations if t > 0)) if any(self.problem.durations) else 0.0
        start = shortest * self.random.choice((0.0, 0.3, 1.01, 2.01))
        now = (run.makespan, run.total)
        blocks = self._blocks(words, run)
        for step in range(ROUND):
            if step % 16 == 0 and over():
                return
            move = self._move(words, blocks)
            if move is None:
                continue
            rank, taken, put = move
            kept = words[rank]
            words[rank] = self._moved(rank, kept, taken, put)
            self.tries += 1
            found = self.problem.run(words) if self.problem.row_fits(rank, words[rank]) else None
            slack = start * (1 - step / ROUND)
            if found is None or (found.makespan - now[0], found.total - now[1]) > (slack, slack):
                words[rank] = kept
                continue
            now = (found.makespan, found.total)
            blocks = self._blocks(words, found)
            if now < self.score:
                if now[0] < self.score[0]:
                    self.last_gain = self.tries
                self.best, self.score = [list(each) for each in words], now
                if now[0] <= enough:
                    return

    def _moved(self, rank: int, word: list[int], taken: int, put: int) -> list[int]:
        """Return the word with a letter elsewhere. Where the rank is then too full, what makes room comes first."""
        problem, cap = self.problem, self.problem.caps[rank]
        word = word.copy()
        word.insert(put, word.pop(taken))
        held, place = 0, 0
        while place < len(word):
            letter = word[place]
            if letter % 3 == FORWARD:
                if held == cap:
                    later = next((i for i in range(place + 1, len(word)) if problem.releases(word[i])), None)
                    if later is None:
                        break
                    if self.random.random() < 0.5:
                        word.insert(place, word.pop(later))
                    else:
                        word.insert(later, word.pop(place))
                    continue
                held += 1
            elif problem.releases(letter):
                held -= 1
            place += 1
        return word

    def _move(self, words: Words, blocks: list[tuple[int, int, int]]) -> tuple[int, int, int] | None:
        """Return a rank, the place of a letter in its word, and where to put it."""
        random = self.random
        rank, first, last = blocks[random.randrange(len(blocks))]
        word = words[rank]
        if random.random() < 0.5:
            # What the next block waits for comes sooner.
            taken = last
            put = random.randrange(first, last) if last > first and random.random() < 0.7 else max(0, last - 1)
            if first > 0 and random.random() < 0.3:
                put = random.randrange(max(0, first - 6), first)
        else:
            # Something of the block gives way.
            taken = random.randrange(first, last + 1)
            put = last if random.random() < 0.5 else random.randrange(last, min(len(word) - 1, last + 8) + 1)
            if random.random() < 0.2:
                put = random.randrange(max(0, first - 8), first + 1)
        if put == taken or (word[put] == word[taken] and abs(put - taken) == 1):
            return None
        return rank, taken, put

    def _blocks(self, words: Words, run: Pass) -> list[tuple[int, int, int]]:
        """Return the longest path, from its end back: each rank it is on, with the first and last place there."""
        problem, ends = self.problem, run.ends
        waits_for, delays, durations = problem.waits_for, problem.delays, problem.durations
        counts: list[list[int]] = []
        where: dict[tuple[int, int], int] = {}
        for word in words:
            seen: dict[int, int] = {}
            row = []
            for place, letter in enumerate(word):
                k = seen.get(letter, 0)
                seen[letter] = k + 1
                row.append(k)
                where[letter, k] = place
            counts.append(row)
        rank = max(range(problem.n_ranks), key=lambda r: ends[words[r][-1]][counts[r][-1]])
        place = last = len(words[rank]) - 1
        blocks = []
        while True:
            letter = words[rank][place]
            k = counts[rank][place]
            start = ends[letter][k] - durations[letter]
            maker = waits_for[letter]
            before = None if place == 0 else ends[words[rank][place - 1]][counts[rank][place - 1]]
            arrival = None if maker < 0 else ends[maker][k] + delays[letter]
            if arrival is not None and (before is None or arrival > before) and problem.ranks[maker // 3] != rank:
                blocks.append((rank, place, last))
                rank = problem.ranks[maker // 3]
                place = last = where[maker, k]
            elif before is None or start <= 0:
                blocks.append((rank, place, last))
                return blocks
            else:
                place -= 1
