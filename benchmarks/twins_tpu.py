"""Whether the TPU's own compiler takes the training step of every model that the audit lets pass.

The models are the clean ones of the audit's corpus, its well-known modules, and ours. Each step is traced whole for
eight cores and compiled for a v5e slice; steps that are one program are compiled once. The test suite compiles a part.

Usage: python benchmarks/twins_tpu.py
Needs the extra `tpu-compiler`, and two minutes of one core.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TRACING = Path(__file__).parents[1] / "tests" / "audit" / "twin_steps.py"
CORES, SLICE = 8, "v5e-8"


def main() -> int:
    """Prints a line for each model that is not taken, and the counts; 1 where there is one."""
    from xla_b2t.xla.slices import slice_named
    from xla_b2t.xla.tpu_compiler import compile_programs

    programs, refused = traced()
    firsts = {text: name for name, (text, _) in reversed(programs.items())}
    verdicts = compile_programs([programs[name][1] for name in firsts.values()], slice_named(SLICE), CORES)
    by_text = dict(zip(firsts, verdicts, strict=True))
    for name, (text, _) in programs.items():
        verdict = by_text[text]
        if not verdict.accepted:
            refused[name] = str(verdict.crash or verdict.refusal)
    for name, why in refused.items():
        print(f"{name}: {why}")
    seconds = sum(verdict.seconds for verdict in verdicts)
    print(f"{len(programs)} models traced, {len(firsts)} programs compiled in {seconds:.0f} s, {len(refused)} refused")
    return 1 if refused else 0


def traced() -> tuple[dict[str, tuple[str, bytes]], dict[str, str]]:
    """Programs by their models' names, as text without Python's lines and as bytes; and why others have none."""
    from xla_b2t.xla.trace import hlo_text
    from xla_b2t.xla.trace_environment import ENVIRONMENT

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRACING), "trace", folder]
        subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True)
        lines = (Path(folder) / "results.jsonl").read_text(encoding="utf-8").splitlines()
        results = {result["name"]: result for result in map(json.loads, lines)}
        programs = {name: Path(each["program"]).read_bytes() for name, each in results.items() if "program" in each}
    texts = {name: re.sub(r", metadata=\{[^}]*\}", "", hlo_text(program)) for name, program in programs.items()}
    refused = {name: each["error"] for name, each in results.items() if "error" in each}
    return {name: (texts[name], program) for name, program in programs.items()}, refused


if __name__ == "__main__":
    sys.exit(main())
