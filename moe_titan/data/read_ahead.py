"""Reading ahead in a child process.

In a thread, tokenizing would hold Python's lock while the training thread wants to launch kernels. The steps lie in memory
that both processes map; over a socket the parent sends an empty message for every free slot of it, and the child answers
with None once a step is in it, or with an exception.
"""

import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from itertools import cycle
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np

from moe_titan.data.reader import Reader, Step


class ReadAhead:
    """Iterates over `reader.steps(position_G3)`, which a child process reads up to `depth` steps ahead.

    `reader` must be picklable. The child ends with the parent, however that ends.

    Raises:
        RuntimeError: on iteration, the child has died. Exceptions of the reader are raised as they are.
    """

    def __init__(self, reader: Reader, position_G3: np.ndarray, depth: int) -> None:
        memory = os.memfd_create("steps")
        os.ftruncate(memory, depth * reader.dtype.itemsize)
        self._slots = np.frombuffer(mmap.mmap(memory, 0), reader.dtype)
        self._turns = cycle(range(depth))
        self._connection, theirs = Pipe()
        # Not a multiprocessing.Process: that would import the main script, and with it torch. From a file, because a pipe
        # would take no more than its buffer before the child is up.
        with open(os.memfd_create("reader"), "w+b") as file:
            pickle.dump((reader, position_G3), file)
            file.seek(0)
            code = f"import sys; sys.path[:] = {sys.path}; from {__name__} import serve; serve({theirs.fileno()}, {memory})"
            # The child inherits what is blocked: these signals are the parent's to handle, also when sent to the group.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1})
            try:
                self._process = subprocess.Popen([sys.executable, "-c", code], stdin=file, pass_fds=(theirs.fileno(), memory))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        os.close(memory)
        for _ in range(depth):
            self._hand_over_slot()

    def __next__(self) -> Step:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(
                f"The process that reads the data ahead has ended with exit code {self._process.wait()} (negative: by this "
                "signal; -9 is often for want of memory). Resume from the last checkpoint; with "
                "training.dataloader.num_workers = 0 the training process reads the data by itself."
            ) from error
        if answer is not None:
            raise answer
        step = Step(*self._slots[next(self._turns)].copy())
        self._hand_over_slot()
        return step

    def close(self) -> None:
        """Ends the child without waiting for it."""
        self._process.kill()
        self._connection.close()

    def _hand_over_slot(self) -> None:
        with suppress(OSError):  # The child has died: so says the answer that does not come.
            self._connection.send_bytes(b"")


def serve(connection_fd: int, memory_fd: int) -> None:
    """The child: fills the slots in turn until it fails or the parent is gone."""
    threading.Thread(target=_end_with_parent, args=(connection_fd,), daemon=True).start()
    connection = Connection(connection_fd)
    try:
        with sys.stdin.buffer as file:
            reader, position_G3 = pickle.load(file)
        steps = reader.steps(position_G3)
        slots = np.frombuffer(mmap.mmap(memory_fd, 0), reader.dtype)
        for turn in cycle(range(len(slots))):
            connection.recv_bytes()
            slots[turn] = next(steps)
            connection.send(None)
    except Exception as error:
        with suppress(OSError):  # The parent is gone.
            connection.send(_portable(error))


def _end_with_parent(connection_fd: int) -> None:
    """Also where the reader waits for a network."""
    hangup = select.poll()
    hangup.register(connection_fd, 0)
    hangup.poll()
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """`error` with its traceback as a note; a RuntimeError that quotes it if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        portable = error
    except Exception:
        portable = RuntimeError(f"{type(error).__name__}: {error}")
    portable.add_note("In the process that reads the data ahead:\n" + "".join(traceback.format_exception(error)))
    return portable
