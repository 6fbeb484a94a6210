"""Ends daemon threads that train before the interpreter ends.

At exit, Python stops a daemon thread when it next takes the GIL. In the middle of a framework's C++ code that ends in
`std::terminate`, which aborts the process. So such threads get a `SystemExit` before, which Python raises between two instructions.
"""

import atexit
import ctypes
import os
import queue
import sys
import threading
import time
import weakref

import keras

_SECONDS = 10.0
_KERAS = os.path.dirname(keras.__file__)
# A thread that waits in these files does nothing that could abort.
_IDLE = {threading.__file__, queue.__file__}

_threads: weakref.WeakSet = weakref.WeakSet()
_last: list = []  # functions to call when no step is under way any more


def note_thread():
    """Remembers the current thread if it is a daemon, since it trains. Python itself waits for other threads."""
    thread = threading.current_thread()
    if thread.daemon:
        _threads.add(thread)


def _files(thread):
    """Yields the files of the functions that a thread is in, the innermost first."""
    frame = sys._current_frames().get(thread.ident)
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def _makes_steps(thread):
    return thread in _threads or any(file.startswith(_KERAS) for file in _files(thread))


def _is_busy(thread):
    return next(_files(thread), threading.__file__) not in _IDLE


def call_last(function):
    """Calls a function before the interpreter ends, when no step is under way any more."""
    _last.append(function)


def watch_exit(wait=None):
    """Ends threads and steps before the interpreter ends. `wait`: a function that waits for the steps that were started."""
    atexit.register(_leave, wait, os.getpid())


def _leave(wait, process):
    if os.getpid() != process:  # a forked child, which has no other threads to wait for
        return
    try:
        _stop_threads()
        if wait is not None:
            wait(None)
    finally:
        for function in _last:
            function()


def _stop_threads():
    """Ends the daemon threads that train, and waits for those that are not idle."""
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    threads = [thread for thread in others if thread.daemon and _makes_steps(thread)]
    for thread in threads:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and any(thread.is_alive() and _is_busy(thread) for thread in threads):
        time.sleep(0.01)
