"""The timeline of a ring: kernels are recognised by name, copies by stream, and the plot is drawn from a file."""

import json
import re
from pathlib import Path

import pytest

from scripts.bench import trace_ring
from scripts.bench.trace_ring import KERNELS, KINDS, classify, device_events, draw, timeline

ROOT = Path(__file__).parents[3]
# The stream of the attention kernels, of circulating blocks and of results. The last two are not in ascending order.
MAIN, BLOCKS, RESULTS = 7, 20, 16
BASE = 1_790_857_026_000_000_000


def event(name: str, stream: int, ts: float, dur: float = 10.0) -> dict:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": {"stream": stream, "device": 0}}


def trace(shift: float = 0.0, base: int = BASE) -> dict:
    """Return the unsorted trace of one rank, which also contains events of the host."""
    events = [
        event("_main_kernel", MAIN, 300.0, 80.0),
        event("_forward_kernel", MAIN, 110.0, 50.5),
        event("Memcpy PtoP (Device -> Device)", BLOCKS, 105.0),
        event("Memcpy DtoD (Device -> Device)", MAIN, 100.0),
        event("Memcpy HtoD (Pinned -> Device)", 33, 90.0),
        event("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >", MAIN, 280.0),
        event("_prepare_kernel", MAIN, 290.0),
        event("Memcpy PtoP (Device -> Device)", RESULTS, 385.0),
        event("Memcpy PtoP (Device -> Device)", BLOCKS, 295.0),
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1.0, "dur": 1.0, "args": {}},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    return {"baseTimeNanoseconds": base, "traceEvents": [x | {"ts": x["ts"] + shift} if "ts" in x else x for x in events]}


def found(ranks: int = 2) -> dict:
    events = timeline([device_events(trace(5.0 * rank)) for rank in range(ranks)])
    return {"case": "causal-64k", "variant": "nvlink-auto", "machine": f"{ranks} x GPU", "events": events}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_kernel_has_a_kind(backend: str, direction: str) -> None:
    """All kernels in a file have the direction of the file."""
    paths = (ROOT / "kernels" / backend).glob(f"{direction}*.py")
    names = [name for path in paths for name in re.findall(r"^def (_\w*kernel)\(", path.read_text(), re.MULTILINE)]
    assert names
    assert {KERNELS[name] for name in names} == {direction}


def test_events_are_classified_by_name_and_stream() -> None:
    """Copies from the host, and copies on the stream of the attention kernels, do not belong to the ring."""
    events = device_events(trace())
    assert [x.start for x in events] == sorted(x.start for x in events)
    kinds = ["other", "other", "block", "forward", "other", "backward", "block", "backward", "result"]
    assert classify(events) == kinds


def test_nccl_kernels_are_messages() -> None:
    events = [event("_forward_kernel", MAIN, 1.0), event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 24, 2.0)]
    assert classify(device_events({"baseTimeNanoseconds": 0, "traceEvents": events})) == ["forward", "nccl"]


def test_ranks_share_a_clock_even_if_their_traces_start_at_different_times() -> None:
    """The second rank is 2.5 us later, and the times of its trace are relative to a base that is one second later."""
    events = timeline([device_events(trace()), device_events(trace(2.5 - 1e6, BASE + 10**9))])
    forward = [x for x in events if x["kind"] == "forward"]
    assert forward == [
        {"rank": 0, "kind": "forward", "stream": MAIN, "start_us": 20.0, "duration_us": 50.5},
        {"rank": 1, "kind": "forward", "stream": MAIN, "start_us": 22.5, "duration_us": 50.5},
    ]
    assert min(x["start_us"] for x in events) == 0.0


def test_plot_has_one_band_per_rank_and_one_lane_per_use_of_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(found(ranks=3)))
    trace_ring.main(["--draw", str(path)])
    assert (tmp_path / "timeline.png").stat().st_size > 5_000
    figure = draw(json.loads(path.read_text()))
    (axes,) = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    bars = {(x.get_facecolor().tobytes(), tuple(x.get_datalim(axes.transData).intervaly.round(2))) for x in axes.collections}
    assert len(bars) == 3 * 5
    assert len({lane for _, lane in bars}) == 3 * 3
    (legend,) = figure.legends
    present = ("forward", "backward", "other", "block", "result")
    assert [text.get_text() for text in legend.get_texts()] == [KINDS[kind][2] for kind in present]
    assert "causal-64k" in axes.get_title()
    assert "3 x GPU" in axes.get_title()
    trace_ring.plt.close(figure)


def test_recording_requires_torchrun_on_one_host(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        trace_ring.main(["--case", "causal-64k"])
    assert "start this script with torchrun, or pass --draw" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        trace_ring.main([])
    assert "all ranks must be on one host" in capsys.readouterr().err
