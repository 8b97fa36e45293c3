"""Log files: a failing log prevents neither a start nor the report of an exit."""

from telescope.utils.process import log_size, log_tail, open_log, rotate_log


def test_lines_are_appended_and_the_tail_is_of_what_came_after_the_start(tmp_path):
    path = tmp_path / "logs" / "x.log"
    with open_log(path) as log:
        log.write(b"before\n")
    start = log_size(path)
    with open_log(path) as log:
        log.write(b"one\ntwo\xff\n")
    assert log_tail(path, 1000, start=start) == "one\ntwo\ufffd"
    assert log_tail(path, 5, start=start) == "two\ufffd"


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_from_its_end(tmp_path):
    path = tmp_path / "x.log"
    path.write_text("new")
    assert log_tail(path, 1000, start=500) == "new"


def test_a_folder_that_cannot_be_made_only_loses_the_log(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    path = tmp_path / "logs" / "x.log"
    with open_log(path) as log:
        log.write(b"lost\n")
    assert "its output is lost" in caplog.text
    assert (log_size(path), log_tail(path, 1000)) == (0, "")


def test_a_long_log_is_rotated_while_a_process_appends_to_it(tmp_path):
    path = tmp_path / "x.log"
    with open_log(path) as log:
        for number in range(3):
            log.write(bytes([ord("a") + number]) * 1000)
            log.flush()
            rotate_log(path, 1500)
        log.write(b"next")
    assert path.read_bytes() == b"c" * 1000 + b"next"
    assert path.with_name("x.log.1").read_bytes() == b"a" * 500 + b"b" * 1000
