import numpy as np
import pytest

from xla_b2t.data.phonemes import BLANK, NUM_CLASSES, PHONEMES, SILENCE, required_steps


def test_phonemes_order_is_the_public_one():
    assert NUM_CLASSES == 41
    assert PHONEMES[BLANK] == "BLANK"
    assert PHONEMES[SILENCE] == "SIL"
    assert SILENCE == 40
    assert list(PHONEMES[1:40]) == sorted(PHONEMES[1:40])
    assert [PHONEMES.index(name) for name in ("AA", "B", "IY", "ZH")] == [1, 7, 18, 39]


@pytest.mark.parametrize(
    ("labels", "steps"), [([], 0), ([5], 1), ([5, 6], 2), ([5, 5], 3), ([5, 5, 5], 5), ([5, 6, 5, 40, 40], 6)]
)
def test_required_steps_counts_a_blank_between_repeats(labels, steps):
    assert required_steps(np.array(labels, np.int32)) == steps
