"""Frames survive any cut of the stream, and other bytes are refused."""

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telescope.utils.frames import pack_frame, receive_frame, split_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), JSON, max_size=2), max_size=3), st.data())
def test_frames_survive_any_cut_of_the_stream(headers, data):
    stream = b"".join(pack_frame(header, b"blob") for header in headers)

    class Cut:
        position = 0

        def recv(self, size):
            begin, self.position = self.position, self.position + data.draw(st.integers(1, size))
            return stream[begin : self.position]

    connection = Cut()
    assert [receive_frame(connection, 10**6) for _ in headers] == headers
    assert receive_frame(connection, 10**6) is None


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
        with pytest.raises(ValueError, match="frame"):
            receive_frame(right, 50)


def test_a_single_frame_is_split_and_one_of_another_length_is_refused():
    frame = pack_frame({}, b"blob")
    assert [bytes(part) for part in split_frame(frame)] == [b"{}", b"blob"]
    for data in (frame[:-1], frame + b"x", b""):
        with pytest.raises(ValueError, match="frame"):
            split_frame(data)
