"""Frames survive any cut of the stream, and other bytes are refused."""

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.utils.frames import BrokenFrameError, FrameReader, pack_frame, receive_frame, split_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.dictionaries(st.text(), JSON, max_size=2), st.binary(max_size=20)), max_size=3), st.data())
def test_frames_survive_any_cut_of_the_stream(frames, data):
    stream = b"".join(pack_frame(header, blob) for header, blob in frames)
    reader, out, position = FrameReader(), [], 0
    while position < len(stream):
        step = data.draw(st.integers(1, len(stream) - position))
        out += reader.feed(stream[position : position + step])
        position += step
    assert out == frames


def test_bytes_that_are_no_frame_are_refused():
    with pytest.raises(BrokenFrameError):
        FrameReader().feed(b"print output is not a frame")


def test_a_frame_is_received_and_the_bytes_after_it_stay_in_the_socket():
    left, right = socket.socketpair()
    with left, right:
        left.sendall(pack_frame({"rank": 1}, b"blob") + b"next")
        assert receive_frame(right, 1000) == {"rank": 1}
        assert right.recv(10) == b"next"
        left.close()
        assert receive_frame(right, 1000) is None


@pytest.mark.parametrize("data", [pack_frame({"text": "x" * 100}), pack_frame(b"[1]"), b"GET / HTTP/1.1"])
def test_a_frame_that_is_too_long_or_no_object_is_refused(data):
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        with pytest.raises(BrokenFrameError):
            receive_frame(right, 50)


def test_a_single_frame_is_split_and_one_of_another_length_is_refused():
    frame = pack_frame({}, b"blob")
    assert [bytes(part) for part in split_frame(frame)] == [b"{}", b"blob"]
    for data in (frame[:-1], frame + b"x", b""):
        with pytest.raises(BrokenFrameError):
            split_frame(data)
