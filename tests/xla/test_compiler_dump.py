"""What libtpu leaves in a folder: the last program's text and buffers, and nothing behind."""

from xla_b2t.xla.compiler_dump import empty, taken

ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <5 add.3 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:
 value: <6 Arg_0.1 @0> (size=4096,offset=0): f32[1024]{0:T(1024)}

Total bytes used: 4608 (4.5KiB)

Used values:
<5 add.3 @0>
 positions:
  add.3
 uses:
 from instruction: %add.3 = f32[]{:T(128)} add(%a, %b)
HloLiveRange (max 7):
  InstructionSequence:
    0:Arg_0.1
    1:add.3
  BufferLiveRange:
    Arg_0.1{}:0-7
  Live ranges at 1 (peak):
    Arg_0.1{}: 4096 bytes (cumulative: 4096 bytes)
"""


def test_taken_gives_what_lasts_and_leaves_an_empty_folder(tmp_path):
    (tmp_path / "module_0003.step.after_optimizations.txt").write_text("HloModule step")
    (tmp_path / "module_0003.step.after_optimizations-buffer-assignment.txt").write_text(ASSIGNMENT)
    (tmp_path / "module_0003.step.after_optimizations_after_buffer_assignment.txt").write_text("another stage")
    (tmp_path / "step.1").mkdir()
    (tmp_path / "step.1" / "more.txt").touch()
    text, buffers = taken(tmp_path)
    assert text == "HloModule step"
    assert buffers.splitlines() == [
        "allocation 1: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}, maybe-live-out:",
        " value: <6 Arg_0.1 @0> (size=4096,offset=0): f32[1024]{0:T(1024)}",
        "    Arg_0.1{}:0-7",
    ]
    assert list(tmp_path.iterdir()) == []


def test_empty_leaves_nothing_of_a_compilation_before(tmp_path):
    (tmp_path / "step.1").mkdir()
    for name in ("module_0003.dead.after_optimizations.txt", "step.1/more.txt"):
        (tmp_path / name).write_text("HloModule dead")
    empty(tmp_path)
    assert taken(tmp_path) == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_taken_of_an_empty_folder_is_nothing(tmp_path):
    assert taken(tmp_path) == ("", "")
