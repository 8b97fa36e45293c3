"""The description of vLLM's quantization by which the unit tests compute is vLLM's, bit for bit."""

import pytest
import torch
from tests.unit.weights.test_engine_quantized import quantize_blocks
from vllm.utils.deep_gemm import per_block_cast_to_fp8


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (1, 1)])
def test_blocks_are_quantized_as_vllm_quantizes_them(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    values, scales = quantize_blocks(weight)
    with torch.compiler.set_stance("force_eager"):  # a compilation would take longer than everything else
        expected_values, expected_scales = per_block_cast_to_fp8(weight, block_size=[128, 128], use_ue8m0=False)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
