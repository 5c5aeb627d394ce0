"""Every way to break the protocol with auxiliary heads and scheduled numbers, and what is then said."""

import numpy as np
import pytest
import torch

from xla_b2t.errors import UserError
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput, checked, head_logits, scheduled_numbers

TRIALS, BINS, CLASSES = 2, 7, 5
FEATURES_BTC = torch.zeros(TRIALS, BINS, 3).bfloat16()
LOGITS_BPK = torch.zeros(TRIALS, BINS, CLASSES).bfloat16()
STEPS_B = torch.ones(TRIALS).int()


class Echo:
    """One step a bin; scheduled as it is told."""

    def __init__(self, numbers=(0.5,)):
        self.numbers = numbers

    def output_steps(self, input_bins):
        return input_bins

    def scheduled(self, step):
        return self.numbers


def with_heads(*heads):
    return DecoderOutput(LOGITS_BPK, STEPS_B, heads=heads)


def refused(function, *arguments):
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return caught.value.what, caught.value.where, caught.value.fix


def test_checked_gives_back_an_output_whose_heads_fit():
    output = with_heads(AuxiliaryHead("a", LOGITS_BPK), AuxiliaryHead("b", LOGITS_BPK, 0.1))
    assert checked(output, FEATURES_BTC, CLASSES, Echo()) is output


@pytest.mark.parametrize(
    ("heads", "what", "fix"),
    [
        ([("a", LOGITS_BPK)], "a head is tuple, expected AuxiliaryHead", "return heads=(AuxiliaryHead("),
        (
            [AuxiliaryHead("a", LOGITS_BPK[:, :, 1:])],
            "logits of the head 'a' are (2, 7, 4), expected (2, steps, 5)",
            "return heads=(AuxiliaryHead(",
        ),
        (
            [AuxiliaryHead("a", LOGITS_BPK.float())],
            "logits of the head 'a' are torch.float32 for features in torch.bfloat16",
            "keep the model's dtype",
        ),
        (
            [AuxiliaryHead("a", LOGITS_BPK[:, 1:])],
            "7 bins gave logits of the head 'a' of 6 steps, output_steps(7) is 7",
            "follow one rule",
        ),
        (
            [AuxiliaryHead("a", LOGITS_BPK), AuxiliaryHead("a", LOGITS_BPK)],
            "the heads are called ['a', 'a']",
            "a name of its own",
        ),
        ([AuxiliaryHead("", LOGITS_BPK)], "the heads are called ['']", "a name of its own"),
    ],
)
def test_checked_of_a_head_that_does_not_fit_names_it(heads, what, fix):
    found = refused(checked, with_heads(*heads), FEATURES_BTC, CLASSES, Echo())
    assert found[:2] == (what, "forward of Echo")
    assert fix in found[2]


@pytest.mark.parametrize(
    ("loss", "found"),
    [(torch.zeros(()), "torch.float32 ()"), (torch.zeros(TRIALS).bfloat16(), "torch.bfloat16 (2,)")],
)
def test_checked_of_a_loss_that_does_not_fit_says_how(loss, found):
    what, where, fix = refused(checked, DecoderOutput(LOGITS_BPK, STEPS_B, loss), FEATURES_BTC, CLASSES, Echo())
    assert what == f"the auxiliary loss is {found}, expected torch.float32 (2,)"
    assert where == "forward of Echo"
    assert ".float()" in fix


def test_head_logits_are_the_main_ones_or_those_of_a_name():
    output = with_heads(AuxiliaryHead("a", LOGITS_BPK + 1))
    assert head_logits(output, "", Echo()) is LOGITS_BPK
    assert head_logits(output, "a", Echo()) is output.heads[0].logits_BPK


@pytest.mark.parametrize(
    ("names", "known", "fix"),
    [(("a", "b"), "a, b", "use --head with one of a, b, or leave it away"), ((), "none", "leave --head away")],
)
def test_head_logits_of_an_unknown_name_lists_the_heads(names, known, fix):
    output = with_heads(*(AuxiliaryHead(name, LOGITS_BPK) for name in names))
    found = refused(head_logits, output, "c", Echo())
    assert found == (f"there is no auxiliary head 'c'; known: {known}", "forward of Echo", fix)


def test_scheduled_numbers_are_one_float32_vector_or_nothing():
    (numbers_N,) = scheduled_numbers(Echo([0.5, 2]), 3)
    assert numbers_N.dtype == torch.float32
    assert numbers_N.tolist() == [0.5, 2.0]
    assert scheduled_numbers(torch.nn.Linear(2, 2), 3) == []


@pytest.mark.parametrize("numbers", [0.5, None, ["high"], [np.inf], [[1.0], [2.0, 3.0]]])
def test_scheduled_numbers_that_are_none_say_what_was_found(numbers):
    what, where, fix = refused(scheduled_numbers, Echo(numbers), 3)
    assert what == f"scheduled(3) gave {numbers!r}, expected a sequence of finite numbers"
    assert where == "scheduled of Echo"
    assert "one number for each thing" in fix
