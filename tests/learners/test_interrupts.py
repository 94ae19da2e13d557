import signal
import threading

import pytest

from learners.interrupts import deferred_interrupt


def test_an_interrupt_acts_after_the_body() -> None:
    done = []

    def work() -> None:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            done.append("body")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["body"]


def test_the_handler_before_is_back_even_after_an_error() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), deferred_interrupt():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_may_use_it() -> None:
    done = []

    def work() -> None:
        with deferred_interrupt():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_an_error_goes_before_an_interrupt_so_that_half_a_step_is_not_saved() -> None:
    def work() -> None:
        with deferred_interrupt(), deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
