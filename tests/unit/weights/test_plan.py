"""Claims about bucket layouts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope.weights.plan import ALIGNMENT_BYTES, DTYPE_BYTES, MIB, TensorMeta, UpdateInfo, make_update, plan_buckets

shapes = st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), max_size=30)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


def update_of(list_of_shapes: list[tuple[int, ...]], **options: object) -> UpdateInfo:
    metas = [TensorMeta(f"t{i}", shape) for i, shape in enumerate(list_of_shapes)]
    return make_update(metas, **{"version": 1, "dtype": "float32", **options})  # type: ignore[arg-type]


@given(shapes, dtypes, st.integers(1, 5000))
def test_every_tensor_is_in_one_bucket_once_in_order_without_overlap(list_of_shapes, dtype, bucket_bytes):
    update = update_of(list_of_shapes, dtype=dtype)
    small = UpdateInfo(**{**update.to_dict(), "bucket_bytes": bucket_bytes})
    buckets = plan_buckets(small)
    assert [meta.name for bucket in buckets for meta, _ in bucket.entries] == update.names
    for bucket in buckets:
        end = 0
        for meta, offset in bucket.entries:
            assert offset >= end
            assert offset * DTYPE_BYTES[dtype] % ALIGNMENT_BYTES == 0
            end = offset + meta.numel
        assert bucket.num_elements == end
        assert end * DTYPE_BYTES[dtype] <= bucket_bytes or len(bucket.entries) == 1


def test_a_float32_tensor_of_a_narrower_transfer_takes_twice_the_elements():
    metas = [TensorMeta("a", (3, 4)), TensorMeta("b", (40,), exact=True), TensorMeta("c", (5,))]
    update = make_update(metas, version=1, dtype="bfloat16")
    (bucket,) = plan_buckets(update)
    assert [meta.dtype for meta, _ in bucket.entries] == ["bfloat16", "float32", "bfloat16"]
    assert [offset for _, offset in bucket.entries] == [0, 32, 128]
    assert update.num_bytes == 2 * 12 + 4 * 40 + 2 * 5
    assert make_update(metas, version=1, dtype="float32").wide == []


@given(shapes)
def test_per_tensor_sends_each_tensor_alone(list_of_shapes):
    buckets = plan_buckets(update_of(list_of_shapes, mode="per_tensor"))
    assert [len(bucket.entries) for bucket in buckets] == [1] * len(list_of_shapes)


def test_buckets_are_as_full_as_the_order_allows():
    update = update_of([(MIB // 16,)] * 12, bucket_mb=1)  # 256 KiB each
    assert [len(bucket.entries) for bucket in plan_buckets(update)] == [4, 4, 4]


def test_an_update_survives_json_and_keeps_its_digest():
    import json

    update = update_of([(3, 4), ()], folder="f")
    again = UpdateInfo(**json.loads(json.dumps(update.to_dict())))
    assert again == update
    assert again.digest == update.digest
    assert plan_buckets(again) == plan_buckets(update)


@pytest.mark.parametrize("change", [
    {"version": 2}, {"dtype": "bfloat16"}, {"mode": "per_tensor"}, {"bucket_bytes": 9}, {"shapes": [[4, 3], [5]]},
    {"dtype": "bfloat16", "wide": ["t0"]},
])  # fmt: skip
def test_the_digest_changes_with_everything_that_both_sides_must_agree_on(change):
    update = update_of([(3, 4), (5,)])
    assert UpdateInfo(**{**update.to_dict(), **change}).digest != update.digest  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "message"), [
    ({"dtype": "int8"}, "cannot be sent as int8"), ({"names": ["a", "a"], "shapes": [[1], [1]]}, "listed twice"),
    ({"names": ["a"], "shapes": []}, "has no shape"),
])  # fmt: skip
def test_an_impossible_update_is_refused(fields, message):
    good = update_of([(2,)]).to_dict()
    with pytest.raises(AssertionError, match=message):
        UpdateInfo(**{**good, **fields})
