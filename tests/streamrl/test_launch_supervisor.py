"""Child processes: forgiven deaths, first errors, drains, and that nothing outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from streamrl.runtime.failure import first_error
from streamrl.runtime.supervisor import Role, RoleSpec, log_tail, supervisor
from streamrl_queue.errors import RoleFailed

WAIT_FOR_EVER = "import signal; print('up', flush=True); signal.pause()"


def spec(tmp_path: Path, code: str, *, name: str = "producer-0", restarts: int = 0, ends: bool = False) -> RoleSpec:
    # `-c CODE` leaves the lifeline argument to sys.argv, where nothing reads it.
    command = (sys.executable, "-c", textwrap.dedent(code))
    return RoleSpec(name=name, command=command, log=tmp_path / f"{name}.log", restarts=restarts, ends=ends)


async def nobody_told(role: Role, again: bool) -> None:
    pass


async def log_says(role: Role, text: str, times: int = 1) -> None:
    with trio.fail_after(10):
        while not role.spec.log.exists() or role.spec.log.read_text().count(text) < times:
            await trio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def failure_of(body: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseExceptionGroup) as caught:
        trio.run(body)  # type: ignore[arg-type]
    return first_error(caught.value)


def test_a_process_that_raised_ends_the_run_within_a_second_with_its_name_and_log(tmp_path: Path) -> None:
    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            healthy = roles.start(spec(tmp_path, WAIT_FOR_EVER, name="engine-0"))
            await log_says(healthy, "up")
            roles.start(spec(tmp_path, "raise SystemExit('the first error')", restarts=5))
            with trio.fail_after(5):
                await trio.sleep_forever()

    error = failure_of(body)
    assert isinstance(error, RoleFailed)
    assert "producer-0 ended with exit code 1" in str(error)
    assert "the first error" in str(error)


def test_a_process_that_a_signal_killed_is_started_again_and_the_caller_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, bool]] = []

    async def died(role: Role, again: bool) -> None:
        told.append((role.spec.name, again))

    async def body() -> None:
        async with supervisor(died) as roles:
            role = roles.start(spec(tmp_path, WAIT_FOR_EVER, restarts=1))
            await log_says(role, "up")
            first = role.pid
            role.signal(signal.SIGKILL)
            await log_says(role, "up", times=2)
            assert role.pid != first
            assert role.starts == 2
            await roles.stop([role], 5)

    trio.run(body)
    assert told == [("producer-0", True)]


def test_more_deaths_than_the_policy_forgives_end_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            roles.start(spec(tmp_path, "import os; os.kill(os.getpid(), 9)", restarts=2))
            with trio.fail_after(10):
                await trio.sleep_forever()

    error = failure_of(body)
    assert isinstance(error, RoleFailed)
    assert "was killed by SIGKILL 3 times within 600 s (limit 2)" in str(error)


def test_a_stopped_process_can_be_killed_and_its_end_says_why(tmp_path: Path) -> None:
    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            role = roles.start(spec(tmp_path, WAIT_FOR_EVER, name="learner-0"))
            await log_says(role, "up")
            role.signal(signal.SIGSTOP)
            role.kill_for("it was silent for 31 s")
            with trio.fail_after(10):
                await trio.sleep_forever()

    error = failure_of(body)
    assert isinstance(error, RoleFailed)
    assert "learner-0 was killed by SIGKILL by its supervisor, because it was silent for 31 s" in str(error)


def test_a_role_that_may_end_ends_without_an_error_and_one_that_may_not_is_an_error(tmp_path: Path) -> None:
    async def ends() -> None:
        async with supervisor(nobody_told) as roles:
            role = roles.start(spec(tmp_path, "pass", ends=True))
            with trio.fail_after(10):
                await role.ended.wait()

    trio.run(ends)

    async def must_not_end() -> None:
        async with supervisor(nobody_told) as roles:
            roles.start(spec(tmp_path, "pass"))
            with trio.fail_after(10):
                await trio.sleep_forever()

    assert "ended with exit code 0" in str(failure_of(must_not_end))


def test_stop_asks_first_and_kills_what_does_not_end_in_time(tmp_path: Path) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT_FOR_EVER}"

    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            polite = roles.start(spec(tmp_path, WAIT_FOR_EVER, name="scorer-0"))
            deaf = roles.start(spec(tmp_path, stubborn))
            await log_says(polite, "up")
            await log_says(deaf, "up")
            assert await roles.stop([polite, deaf], 0.3) == ("producer-0",)
            assert not polite.running
            assert not deaf.running

    trio.run(body)


def test_grandchildren_end_with_the_role_that_left_them(tmp_path: Path) -> None:
    code = f"""
    import subprocess, sys, os
    child = subprocess.Popen([sys.executable, "-c", {WAIT_FOR_EVER!r}])
    print("grandchild", child.pid, flush=True)
    os._exit(0)
    """

    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            role = roles.start(spec(tmp_path, code, ends=True))
            with trio.fail_after(10):
                await role.ended.wait()
                pid = int(role.spec.log.read_text().split("grandchild ")[1].split()[0])
                while not gone(pid):
                    await trio.sleep(0.01)

    trio.run(body)


@pytest.mark.parametrize("stopped", [False, True])
def test_children_die_within_two_seconds_of_a_parent_that_was_killed(tmp_path: Path, stopped: bool) -> None:
    child = (
        "import sys, signal, pathlib; from streamrl.runtime.lifeline import die_with_parent; "
        "die_with_parent(int(sys.argv[-1]), remove=[pathlib.Path(sys.argv[1])]); "
        "print('up', flush=True); signal.pause()"
    )
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    parent = f"""
    import sys, trio
    from pathlib import Path
    from streamrl.runtime.supervisor import RoleSpec, supervisor

    async def nobody(role, again):
        pass

    async def main():
        async with supervisor(nobody) as roles:
            command = (sys.executable, "-c", {child!r}, {str(sockets)!r})
            role = roles.start(RoleSpec(name="engine-0", command=command, log=Path({str(tmp_path / "log")!r})))
            while "up" not in role.spec.log.read_text():
                await trio.sleep(0.01)
            print(role.pid, flush=True)
            await trio.sleep_forever()

    trio.run(main)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait()
    process.stdout.close()

    async def dies() -> None:
        with trio.fail_after(2):
            while not gone(pid):
                await trio.sleep(0.01)

    trio.run(dies)
    assert not sockets.exists()


def test_the_log_tail_is_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "(the log is empty)" in log_tail(log)
    log.write_text("\n".join(f"line {i}" for i in range(100_000)))
    assert log_tail(log, lines=2) == "    line 99998\n    line 99999"


def test_no_file_descriptor_is_left_behind(tmp_path: Path) -> None:
    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            role = roles.start(spec(tmp_path, "pass", ends=True))
            await role.ended.wait()

    before = os.listdir("/proc/self/fd")
    trio.run(body)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_process_that_left_without_an_error_is_said_to_have_been_ended_by_a_call_of_exit(tmp_path: Path) -> None:
    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            roles.start(spec(tmp_path, "import os; print('up', flush=True); os._exit(3)", restarts=5))
            with trio.fail_after(10):
                await trio.sleep_forever()

    said = str(failure_of(body))
    assert said.startswith(
        "producer-0 ended with exit code 3 and left no error: something in it may have called sys.exit"
    )
    assert said.endswith("    up")


def test_an_error_of_ours_is_told_in_its_own_words_without_a_traceback(tmp_path: Path) -> None:
    words = tmp_path / "learner-0.error"
    code = f"""
    from pathlib import Path
    from streamrl.runtime.failure import LastWords
    from streamrl_queue.errors import NoProgress
    LastWords.of(NoProgress("20 steps without a signal")).write(Path({str(words)!r}))
    raise SystemExit(1)
    """

    async def body() -> None:
        async with supervisor(nobody_told) as roles:
            roles.start(spec(tmp_path, code, name="learner-0"))
            with trio.fail_after(10):
                await trio.sleep_forever()

    said = str(failure_of(body))
    assert said.startswith("learner-0: NoProgress: 20 steps without a signal (log: ")
