"""An environment whose reward runs the attack that the completion names."""

import asyncio
import contextlib
import ctypes
import os
import subprocess
import sys
import time

from telescope.environments.base import RewardResult, Sample, SingleTurnEnvironment


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Hostile(SingleTurnEnvironment):
    def load_dataset(self, num_samples=-1):
        return [Sample(f"question {i}", answer=str(i)) for i in range(100)]

    def compute_reward(self, completion, sample, eos_token=""):
        deed, _, argument = completion.partition(" ")
        return getattr(self, deed)(argument)

    def fine(self, argument):
        return RewardResult(1.0, sample_metrics={"pid": os.getpid()})

    def sleep(self, argument):
        time.sleep(float(argument))
        return self.fine(argument)

    async def wait(self, argument):
        await asyncio.sleep(float(argument))
        return self.fine(argument)

    async def wait_whatever_happens(self, argument):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def block_in_a_task(self, argument):
        async def block():
            time.sleep(float(argument))  # noqa: ASYNC251  # the fault that is played here

        await asyncio.gather(asyncio.sleep(0.01), block())
        return self.fine(argument)

    def run_a_loop(self, argument):
        return asyncio.run(self.wait("0.01"))

    def hold_the_interpreter(self, argument):
        return RewardResult(float(len(str(95**97**99))))

    def raise_error(self, argument):
        raise ValueError(f"no luck with {argument}")

    def exit(self, argument):
        sys.exit(3)

    async def exit_later(self, argument):
        await asyncio.sleep(0.01)
        sys.exit(3)

    async def await_a_cancelled_task(self, argument):
        task = asyncio.ensure_future(asyncio.sleep(3600))
        task.cancel()
        await task

    def end(self, argument):
        os._exit(7)

    def crash(self, argument):
        ctypes.string_at(0)

    def gorge(self, argument):
        hoard = []
        while True:
            hoard.append(bytearray(64 * 2**20))

    def print(self, argument):
        for _ in range(1000):
            print("{}\x00\xff" * 20)
        sys.stdout.write("no newline")
        os.write(1, b"\x01\x00\x00\x00\x00\x00\x00\x00{")
        subprocess.run(["echo", "from a child"], check=True)
        return self.fine(argument)

    def print_without_end(self, argument):
        for _ in range(int(argument)):
            print("x" * 2**20)
            time.sleep(0.02)
        return self.fine(argument)

    def double_fork(self, argument):
        """Starts a process that leaves the session and the parents of its worker."""
        started = os.path.join(argument, "pid")
        script = f"import os, time; os.setsid(); open({started!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
        subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{script}" &'], check=True)
        while not (os.path.exists(started) and os.path.getsize(started)):
            time.sleep(0.01)
        return self.fine(argument)

    def raise_what_cannot_be_printed(self, argument):
        raise Unprintable()

    def say_a_lot(self, argument):
        return RewardResult(1.0, info_turns=[{"said": "x" * 40 * 2**20}])

    def fork_and_raise(self, argument):
        if os.fork() == 0:
            raise ValueError("raised by the copy")
        time.sleep(0.2)
        return self.fine(argument)

    def fork_and_return(self, argument):
        os.fork()
        return self.fine(argument)

    async def fork_and_wait(self, argument):
        await asyncio.sleep(0.01)
        os.fork()
        await asyncio.sleep(0.01)
        return self.fine(argument)

    def number(self, argument):
        return RewardResult(float(argument))

    def wrong_type(self, argument):
        return 1.0

    def wrong_metric(self, argument):
        return RewardResult(1.0, sample_metrics={"rank": "first"})
