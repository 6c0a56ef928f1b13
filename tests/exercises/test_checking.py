"""A check tells any fault of an answer in a sentence, soon, and leaves no process behind."""

import builtins
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_pp.exercises import Exercise, Mistake, check, hint, in_process, progress, solution
from course_pp.exercises.answer import Answer
from course_pp.exercises.mistakes import Pending
from tests.exercises.toy import EXERCISE, only_the_toy, shape_of_result
from tests.processes import no_process_left

pytestmark = pytest.mark.ranks

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exercise]:
    """The toy exercise; answers travel whole, as those of a notebook do."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with only_the_toy(monkeypatch) as exercise:
        yield exercise
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def named(fn: Callable[..., Any]) -> Callable[..., Any]:
    fn.__name__ = "double"
    return fn


def stub(x):
    raise NotImplementedError


def spins(x):
    while True:
        pass


def sleeps(x):
    if x == 3:
        time.sleep(60)
    return 2 * x


def prints_for_ever(x):
    while True:
        print("spam" * 100)


def raises(x):
    return x[0] * 2


def raises_in_a_helper(x):
    return helper(x)


def helper(x):
    return 1 / 0


def raises_what_cannot_be_shown(x):
    class Odd(Exception):
        def __str__(self):
            raise OSError

    raise Odd


def raises_at_length(x):
    raise ValueError("spam" * 100_000)


def calls_what_torch_has_not(x):
    return torch.ones(2, dtype=torch.int32).log_softmax(0)


def recurses(x):
    return recurses(x)


def calls_sys_exit(x):
    sys.exit("bye")


def calls_exit(x):
    exit()


def calls_os_exit(x):
    os._exit(3)


def kills_itself(x):
    os.kill(os.getpid(), signal.SIGKILL)


def interrupts(x):
    raise KeyboardInterrupt


def eats_memory(x):
    return [0] * 10**10


def asks(x):
    return input("x? ")


def yields(x):
    yield 2 * x


def returns_a_list_of_generators(x):
    return [2 * x, (y for y in range(x))]


async def is_async(x):
    return 2 * x


def returns_what_prints_for_ever(x):
    class Odd:
        def __repr__(self):
            while True:
                pass

    return Odd()


def ends_its_parent(x):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def changes_its_argument(x):
    if isinstance(x, list):
        x *= 2
    return 2 * x if isinstance(x, int) else x


def uses_a_lock(x):
    with LOCK:
        return 2 * x


def takes_two(x, y):
    return x + y


def returns_nothing(x):
    2 * x


def cannot_be_compared(x):
    class Odd:
        __hash__ = None

        def __eq__(self, other):
            raise OSError("no")

    return Odd()


def is_wrong(x):
    return x


NOT_YET = {
    spins: "`double(1)` was still running after 1 s, test_checking.py line",
    sleeps: "`double(3)` was still running after 1 s",
    prints_for_ever: "still running after 1 s",
    raises: "`double(1)` raised TypeError: 'int' object is not subscriptable, in line",
    raises_in_a_helper: "ZeroDivisionError: division by zero, in line",
    raises_what_cannot_be_shown: "raised Odd: (its message cannot be shown), in line",
    raises_at_length: "spam …, in line",
    calls_what_torch_has_not: 'raised NotImplementedError: "log_softmax',
    recurses: "RecursionError",
    calls_sys_exit: "`double(1)` tried to leave Python, in line",
    calls_exit: "exit",
    calls_os_exit: "os._exit",
    kills_itself: "`double(1)` ended its whole process. Likely cause: Something killed it",
    interrupts: "raised KeyboardInterrupt",
    eats_memory: "MemoryError",
    asks: "EOFError",
    yields: "returned a generator. Likely cause: It contains `yield`",
    returns_a_list_of_generators: (
        "returned a list with a generator in it. Likely cause: It contains `yield`, or"
    ),
    is_async: "It begins with `async def`",
    returns_what_prints_for_ever: "still running after 1 s",
    ends_its_parent: "broke the process that it ran in",
    changes_its_argument: "`double([2])` changed its argument `x` from [2] to [2, 2]",
    uses_a_lock: "cannot be sent to another process",
    takes_two: (
        "cannot be called as `double(1)`: missing a required argument: 'y'. Likely cause: Keep the"
        " parameters"
    ),
    returns_nothing: "is None",
    cannot_be_compared: "The check itself stopped: OSError: no",
    is_wrong: "`double(1)` is 1. Likely cause: Multiply.",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("answer", "words"), NOT_YET.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_whatever_an_answer_does_is_said_in_a_sentence(
    answer: Callable[..., Any],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = 1.0 if "still running after 1 s" in words else EXERCISE.limit_s
    with only_the_toy(monkeypatch, replace(EXERCISE, limit_s=limit_s)), no_process_left():
        verdict = check(named(answer))
    assert verdict.status == "not yet"
    assert words in " ".join(verdict.text.split())
    assert len(verdict.text) < 4000
    assert capfd.readouterr() == ("", "")


def test_the_line_of_the_answer_that_raised_is_shown() -> None:
    line = raises.__code__.co_firstlineno + 1
    assert f"in line {line}: `return x[0] * 2`" in check(named(raises)).symptom


def test_a_function_cached_in_a_notebook_is_pending_while_it_is_the_stub(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # cloudpickle would send it by its name, which a rank does not find in its own __main__.
    cached = functools.cache(stub)
    cached.__module__, cached.__qualname__ = "__main__", "double"
    monkeypatch.setattr(sys.modules["__main__"], "double", cached, raising=False)
    assert check(named(cached)).status == "pending"


def twice(x):
    return x + x


@functools.cache
def powers(n):
    return 1 if n == 0 else 2 * powers(n - 1)


def by_a_cached_recursion(x):
    return x * powers(1)


def logged(fn):
    def wrapper(*args):
        return fn(*args)

    return wrapper


def logged_by_name(fn):
    return functools.wraps(fn)(logged(fn))


def plus(x, y):
    return x + y if y is not None else x + x


class Doubler:
    def __call__(self, x):
        return twice(x)

    def twice(self, x):
        return twice(x)


@pytest.mark.parametrize(
    "double",
    [
        by_a_cached_recursion,
        lambda x: twice(x),
        logged(twice),
        logged_by_name(twice),
        logged_by_name(logged_by_name(twice)),
        functools.partial(plus, y=None),
        functools.partial(functools.partial(plus), y=None),
        Doubler(),
        Doubler().twice,
    ],
    ids=[
        "cached helper",
        "lambda",
        "wrapped",
        "wraps",
        "wraps twice",
        "partial",
        "partial twice",
        "object",
        "method",
    ],
)
def test_a_right_answer_is_correct_whatever_it_is_wrapped_in(double: Callable[..., Any]) -> None:
    verdict = check(double)
    assert verdict.status == "correct", verdict.text
    assert "double" in solution(double).text


@pytest.mark.parametrize(
    "cached", [functools.cache, functools.lru_cache(maxsize=3)], ids=["cache", "lru_cache"]
)
def test_a_cached_answer_is_correct_where_its_arguments_can_be_looked_up(
    cached: Callable[..., Any],
) -> None:
    assert Answer(cached(twice)).calls([(1,), (2,), (2,)]) == [2, 4, 4]
    double = cached(twice)
    assert "`functools.cache` looks a result up by the arguments, and a list" in check(double).cause


@pytest.mark.parametrize(
    "wrap", [functools.cache, logged, functools.partial], ids=["cache", "wrapped", "partial"]
)
def test_a_wrapped_answer_that_raises_is_told_its_own_line(wrap: Callable[..., Any]) -> None:
    double = wrap(raises)
    line = raises.__code__.co_firstlineno + 1
    assert (
        f"`double(1)` raised TypeError: 'int' object is not subscriptable, in line {line}: "
        in check(double).symptom
    )


def test_a_result_too_long_to_send_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "_RESULT_BYTES", 1000)
    with pytest.raises(in_process.Stopped, match=r"returned a list of 2,\d\d\d bytes"):
        in_process._sendable([0] * 1000)


def test_an_argument_that_is_or_holds_nothing_is_compared_like_any_other() -> None:
    assert in_process._same([None, {"a": None}], [None, {"a": None}])
    assert not in_process._same([None], [0])


def test_a_stub_is_pending_and_says_where_help_is() -> None:
    verdict = check(named(stub))
    assert verdict.status == "pending"
    assert 'hint("double")' in verdict.text


def lacks_lists(x):
    if isinstance(x, list):
        raise NotImplementedError("lists")
    return 2 * x


def lacks_three(x):
    if x == 3:
        raise NotImplementedError
    return 2 * x


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lacks_lists, "`double([2])` raised NotImplementedError: lists, in line"),
        (lacks_three, "`double(3)` raised NotImplementedError, in line"),
    ],
)
def test_a_case_that_is_left_is_pending_and_named(answer: Callable[..., Any], words: str) -> None:
    verdict = check(named(answer))
    assert verdict.status == "pending"
    assert words in verdict.text
    assert "Complete `double`" in verdict.text


def test_the_stub_itself_is_not_told_what_it_raised() -> None:
    assert "raised" not in check(named(stub)).text


def test_a_case_that_is_left_on_a_rank_is_named_too() -> None:
    def answer(rank, p):
        if rank == 1:
            raise NotImplementedError("the last rank")

    with pytest.raises(
        Pending, match="`answer`, on 2 ranks, raised NotImplementedError: the last rank"
    ):
        Answer(answer).on_ranks(2, meet, 2)


@pytest.mark.parametrize("answer", [lambda x: 2 * x, lambda x: x + x, EXERCISE.solution])
def test_right_answers_are_correct_however_they_are_written(answer: Callable[..., Any]) -> None:
    assert check(named(answer)).status == "correct"


def test_what_an_answer_prints_is_shown_with_the_verdict_and_nowhere_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def chatty(x):
        print("x is", x)
        print("to stderr", file=sys.stderr)
        return 2 * x

    verdict = check(named(chatty))
    assert verdict.status == "correct"
    assert "x is 1\n" in verdict.printed
    assert "to stderr" in verdict.printed
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "x\n" * 10_000], ids=["one long line", "many lines"]
)
def test_of_what_an_answer_prints_at_length_the_beginning_is_shown(text: str) -> None:
    def chatty(x):
        print(text)
        return 2 * x

    verdict = check(named(chatty))
    assert verdict.status == "correct"
    assert "characters more" in verdict.printed
    assert len(verdict.text) < 4000


def after_it_started_a_thread(x):
    threading.Thread(target=spins, args=(x,)).start()
    return 2 * x


def after_it_started_a_process_in_its_own_session(x):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return 2 * x


def after_it_forked(x):
    if os.fork() == 0:
        os.setsid()
        spins(x)
    return 2 * x


def after_it_spoilt_python(x):
    torch.allclose = builtins.open = None
    return 2 * x


@pytest.mark.parametrize(
    "answer",
    [
        after_it_started_a_thread,
        after_it_started_a_process_in_its_own_session,
        after_it_forked,
        after_it_spoilt_python,
    ],
)
def test_what_a_right_answer_leaves_behind_ends_with_its_process(
    answer: Callable[..., Any],
) -> None:
    with no_process_left():
        assert check(named(answer)).status == "correct"
    assert builtins.open is not None


@pytest.fixture
def never_ends(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """An answer at whose first call this process is interrupted."""

    def double(x):
        (tmp_path / "called").touch()
        time.sleep(60)

    def interrupt() -> None:
        while not (tmp_path / "called").exists() and not over.wait(0.02):
            pass
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(interrupt)
        yield double
        over.set()


def test_an_interrupt_still_interrupts(never_ends: Callable[..., Any]) -> None:
    with no_process_left(), pytest.raises(KeyboardInterrupt):
        Answer(never_ends, limit_s=30)(1)


def test_an_interrupted_check_says_so_in_a_line_and_still_interrupts(
    never_ends: Callable[..., Any],
) -> None:
    with (
        no_process_left(),
        pytest.raises(KeyboardInterrupt, match=r"^○ interrupted · run the cell again\.$"),
    ):
        check(never_ends)


def test_an_interrupted_check_is_no_attempt() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Answer, "calls", lambda *args: interrupts(args))
        with pytest.raises(KeyboardInterrupt):
            check(named(is_wrong))
    assert [row.attempts for row in progress().rows] == [0]


def test_an_unknown_function_is_refused_with_the_nearest_name() -> None:
    def dubble(x):
        return 2 * x

    with pytest.raises(ValueError, match=r"no exercise called 'dubble'\. The nearest is 'double'"):
        check(dubble)
    with pytest.raises(ValueError, match="nearest is 'double'"):
        hint("dooble")
    with pytest.raises(ValueError, match="nearest is 'double'"):
        solution("dooble")


def test_a_name_like_no_other_is_refused_with_all_names() -> None:
    with pytest.raises(ValueError, match="They are double") as caught:
        check(len)
    assert "nearest" not in str(caught.value)


def test_a_lambda_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="write it with `def`"):
        check(lambda x: 2 * x)


@pytest.mark.parametrize("wrong", ["double", 3, None])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="takes the function itself"):
        check(wrong)


def test_hints_come_one_a_call_and_then_all_together() -> None:
    assert hint("double").text == "Hint 1 of 2: Think."
    assert hint(EXERCISE.solution).text.startswith("Hint 2 of 2: Use `*`.\nThere are no more")
    assert hint("double").text.startswith(
        "Hint 1 of 2: Think.\nHint 2 of 2: Use `*`.\nThere are no more"
    )


def test_the_solution_is_shown_as_it_can_be_pasted() -> None:
    shown = solution("double")
    assert shown.text == 'def double(x):\n    """Twice x."""\n    return 2 * x  # lists, too'
    assert shown.markdown == f"```python\n{shown.text}\n```"


# ranks


def meet(rank: int, fn: Callable[..., Any], p: int) -> Any:
    return fn(rank, p)


def all_send_first(rank, p):
    x = torch.ones(4)
    dist.send(x, (rank + 1) % p)
    dist.recv(x, (rank - 1) % p)


def only_rank_0_reduces(rank, p):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def receives_too_much(rank, p):
    if rank == 0:
        dist.send(torch.ones(100), 1)
    if rank == 1:
        dist.recv(torch.ones(1), 0)


def rank_1_raises(rank, p):
    if rank == 1:
        return [][1]
    dist.barrier()


def rank_2_exits(rank, p):
    if rank == 2:
        sys.exit()
    dist.barrier()


def yields_on_a_rank(rank, p):
    yield rank


def rank_1_spins(rank, p):
    while rank == 1:
        pass


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("answer", "limit_s", "words"),
    [
        (
            all_send_first,
            1.0,
            "Rank 0 waits for rank 1, rank 1 for rank 2 and rank 2 for rank 0: none can move",
        ),
        (only_rank_0_reduces, 1.0, "Ranks 1 and 2 have returned"),
        (
            receives_too_much,
            30.0,
            "gloo ends a process whose message is longer than the tensor that receives it",
        ),
        (rank_1_raises, 30.0, "on 3 ranks, raised IndexError: list index out of range, in line"),
        (rank_2_exits, 30.0, "tried to leave Python"),
        (yields_on_a_rank, 30.0, "returned a generator. It contains `yield`"),
        (rank_1_spins, 1.0, "rank 1, was still running after 1 s"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_goes_wrong_on_ranks_is_said_too(
    answer: Callable[..., Any], limit_s: float, words: str
) -> None:
    with no_process_left(), pytest.raises(Mistake) as caught:
        Answer(answer, limit_s).on_ranks(3, meet, 3)
    assert words in str(caught.value)


def test_an_entry_that_cannot_be_sent_is_named_without_what_a_harness_puts_it_in() -> None:
    with pytest.raises(Mistake, match=r"on one rank, returned a lock\."):
        Answer(lambda: threading.Lock()).on_ranks(1, packed)


def packed(rank: int, fn: Callable[..., Any]) -> Any:
    return rank, [fn()]


def test_a_harness_can_say_itself_what_is_wrong() -> None:
    with pytest.raises(Mistake, match="rank 1 says so"):
        Answer(spins).on_ranks(2, complain)


def complain(rank: int, fn: Callable[..., Any]) -> None:
    if rank == 1:
        raise Mistake("rank 1 says so")
    dist.barrier()


def test_a_harness_that_stumbles_over_a_result_says_that_it_was_outside() -> None:
    with pytest.raises(Mistake, match="It happened outside your function"):
        Answer(lambda rank, p: None).on_ranks(2, shape_of_result)


# arguments


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x["tensor"].add_(1),
        lambda x: x["list"][1].append(4),
        lambda x: x.pop("number"),
        lambda x: x["object"].__dict__.update(a=2),
    ],
)
def test_a_change_deep_in_an_argument_is_noticed(change: Callable[[Any], Any]) -> None:
    with pytest.raises(Mistake, match="changed its argument `x"):
        Answer(lambda x: [change(x), None][1])(nested())


def test_an_argument_that_was_only_read_counts_as_unchanged() -> None:
    assert Answer(lambda x: float(x["tensor"].sum()) + x["number"])(nested()) != 0


class Thing:
    def __init__(self) -> None:
        self.a = float("nan")


def nested() -> dict[str, Any]:
    return {
        "tensor": torch.tensor([1.0, 2.0]),
        "list": [1, [2, 3]],
        "number": 4.0,
        "object": Thing(),
    }


def test_keyword_arguments_reach_the_answer() -> None:
    assert Answer(lambda x, y=1: x * y)(3, y=5) == 15


def test_importing_the_exercises_keeps_torch_out() -> None:
    program = "import sys, course_pp.exercises; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert {"torch", "numpy", "matplotlib", "course_pp.exercises.gpipe"}.isdisjoint(
        done.stdout.split()
    )
