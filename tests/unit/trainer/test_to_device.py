"""Moving a micro-batch to a device."""

import os
import threading

import numpy as np
import pytest
import torch
from tests.unit.trainer.test_packing import make_sample, rows_of

from telescope.trainer.batch import MicroBatch
from telescope.trainer.loss import prepare, to_device
from telescope.trainer.model_input import model_input
from telescope.trainer.packing import lay_out, pack_step

CPU = torch.device("cpu")
ARRAYS = ("token_ids_T", "position_ids_T", "engine_logprob_T", "advantage_T", "sample_index_T")


def row_of(*lengths: int, seq_len: int = 256) -> MicroBatch:
    samples = [make_sample(index, length) for index, length in enumerate(lengths)]
    inputs = pack_step(samples, step=0, version=2, seq_len=seq_len, num_ranks=1, pad_to_multiple_of=1)
    (row,) = rows_of(inputs)
    return row


@pytest.mark.parametrize("float_dtype", [torch.float32, torch.float64])
def test_trained_tokens_arrive_with_their_numbers_in_the_types_that_the_loss_wants(float_dtype: torch.dtype):
    row = row_of(9, 20, 33)
    rows, given = to_device(prepare(row, 2, ["countdown"]), CPU, float_dtype), model_input(row, CPU, "varlen")

    predicted_N = np.flatnonzero(row.trained_T)
    assert given.predicting_N.tolist() == (predicted_N - 1).tolist()
    assert given.target_N.tolist() == row.token_ids_T[predicted_N].tolist()
    assert given.token_ids_ST.tolist() == [row.token_ids_T.tolist()]
    assert given.position_ids_ST.tolist() == [row.position_ids_T.tolist()]
    assert rows.sample_N.tolist() == row.sample_index_T[predicted_N].tolist()
    assert rows.age_N.tolist() == (2 - row.version_T[predicted_N]).tolist()
    assert rows.on_policy_N.tolist() == (row.version_T[predicted_N] == 2).tolist()
    assert rows.environment_N.tolist() == [0] * len(predicted_N)
    np.testing.assert_allclose(rows.engine_logprob_N, row.engine_logprob_T[predicted_N], rtol=1e-6)
    np.testing.assert_allclose(rows.advantage_N, row.advantage_T[predicted_N], rtol=1e-6)
    assert {rows.engine_logprob_N.dtype, rows.advantage_N.dtype, rows.age_N.dtype, rows.on_policy_N.dtype} == {
        float_dtype
    }
    indices = given.token_ids_ST, given.predicting_N, given.target_N, rows.sample_N
    assert {index.dtype for index in indices} == {torch.int64}


def test_samples_side_by_side_have_no_row_of_padding():
    row = lay_out([make_sample(0, 9), make_sample(1, 20)], pad_to_multiple_of=64)
    given = model_input(row, CPU, None)
    assert given.token_ids_ST.shape == (2, 20)
    assert given.token_ids_ST[0, :9].tolist() == row.token_ids_T[:9].tolist()
    assert given.token_ids_ST[1].tolist() == row.token_ids_T[9:29].tolist()
    assert given.target_N.tolist() == given.token_ids_ST.flatten()[given.predicting_N + 1].tolist()
    assert model_input(lay_out([]), CPU, None).token_ids_ST.shape == (1, 2), "a dummy"


def test_read_only_arrays_are_copied():
    row = row_of(9, 20)
    for name in ARRAYS:
        getattr(row, name).flags.writeable = False  # as they come out of Ray's object store
    to_device(prepare(row, 2), CPU, torch.float64)
    before = row.token_ids_T.copy()
    model_input(row, CPU, "varlen").token_ids_ST += 1
    assert np.array_equal(row.token_ids_T, before)


def test_a_long_row_is_moved_by_the_calling_thread():
    """torch would wake the threads of a pool for each array, which cost up to 66 ms a row on a machine of 16 cores."""
    row = row_of(200_000, seq_len=200_000)
    host = prepare(row, 2)
    threads: list[set[str]] = []

    def move() -> None:  # a new thread: OpenMP keeps a pool for each thread that has needed one
        torch.set_num_threads(4)
        threads.append(set(os.listdir("/proc/self/task")))
        to_device(host, CPU, torch.float32)
        model_input(row, CPU, "varlen")
        threads.append(set(os.listdir("/proc/self/task")))

    num_threads = torch.get_num_threads()
    mover = threading.Thread(target=move)
    mover.start()
    mover.join(60)
    torch.set_num_threads(num_threads)
    before, after = threads
    assert not after - before
