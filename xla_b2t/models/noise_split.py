"""The three-network decoder: one network estimates the noise, one decodes what is left, one must fail on the noise.

    features -> noise day layer -> patches -> noise network = estimated noise
    features -> clean day layer -> patches - estimated noise -> clean network -> class scores, which are decoded
                      estimated noise -> gradient reversal -> noisy network -> class scores of the head `noisy`

The noise network is as wide as a patch, so that what it gives can be taken away from one. Both speech networks are
trained on the same labels. The gradient of the noisy one reaches the noise network with its sign turned: what helps to
recognise phonemes is driven out of the estimated noise, and so stays in what the clean network sees.

In: features, lengths, days. Out: class scores a step and the auxiliary head (`models/protocol.py`). At 512 features, 45
days and 41 classes it has 687,568,466 parameters.
"""

from functools import partial

from torch import Tensor, nn

from xla_b2t.config import AtLeastOne, NotNegative, Positive, Record, ZeroOrMore
from xla_b2t.models.day_affine import DayAffine
from xla_b2t.models.dropout import dropout
from xla_b2t.models.gru import GruStack
from xla_b2t.models.gru_decoder import DropoutRate
from xla_b2t.models.patches import patch_steps, patch_steps_of, patches
from xla_b2t.models.protocol import AuxiliaryHead, DecoderOutput, Sizes
from xla_b2t.models.recognizer import class_scores, first_state, initialise
from xla_b2t.models.reversal import ramp, reverse_gradient

NOISY = "noisy"
"""Name of the head that listens to the noise alone."""


class NoiseSplitOptions(Record):
    """`[model.options]` of `noise_split`."""

    patch_bins: AtLeastOne = 14
    patch_stride: AtLeastOne = 4
    hidden: AtLeastOne = 768
    """Of both speech networks; the noise network's is `patch_bins` times the features."""
    noise_layers: AtLeastOne = 2
    clean_layers: AtLeastOne = 3
    noisy_layers: AtLeastOne = 2
    dropout: DropoutRate = 0.4
    """Between the recurrent layers of each network."""
    input_dropout: DropoutRate = 0.2
    """After both day layers."""
    clean_weight: Positive = 1.0
    noisy_weight: Positive = 1.0
    """Weights of the two CTC losses in the sum."""
    reversal: NotNegative = 1.0
    """Strength of the gradient reversal in the end (lambda); the noise network sees it times `noisy_weight`."""
    reversal_warmup_steps: ZeroOrMore = 0
    """Updates before the strength begins to rise from 0."""
    reversal_ramp_steps: ZeroOrMore = 10_000
    """Updates of the rise."""
    kernel: bool = True
    """As in `gru_decoder`; the noise network of the published sizes is too wide for it."""


class Recognizer(nn.Module):
    """A speech network: recurrent layers over patches, and class scores."""

    def __init__(self, gru: GruStack, num_classes: int):
        super().__init__()
        self.gru = gru
        self.out = nn.Linear(gru.hidden, num_classes)
        initialise(self.gru, self.out)
        self.h0 = first_state(gru.hidden)

    def forward(self, sequence_PBF: Tensor) -> Tensor:
        """logits_BPK."""
        return class_scores(self.gru, self.h0, self.out, sequence_PBF)


class NoiseSplit(nn.Module):
    """See the module's docstring; it keeps `models.protocol.ScheduledDecoder`."""

    def __init__(self, sizes: Sizes, options: NoiseSplitOptions):
        super().__init__()
        self.options = options
        width, hidden, classes = options.patch_bins * sizes.num_features, options.hidden, sizes.num_classes
        stack = partial(GruStack, dropout=options.dropout, kernel=options.kernel)
        self.noise_day = DayAffine(sizes.num_days, sizes.num_features)
        # Left as GruStack draws it. Orthogonal weights have the same variance, 1 / (3 hidden); to find them takes a QR
        # decomposition of a (21504, 7168) matrix a layer, on every rank.
        self.noise_gru = stack(width, width, options.noise_layers)
        self.noise_h0 = first_state(width)
        self.clean_day = DayAffine(sizes.num_days, sizes.num_features)
        self.clean = Recognizer(stack(width, hidden, options.clean_layers), classes)
        self.noisy = Recognizer(stack(width, hidden, options.noisy_layers), classes)

    def forward(
        self, features_BTC: Tensor, input_bins_B: Tensor, days_B: Tensor, scheduled_N: Tensor | None = None
    ) -> DecoderOutput:
        """Decodes a batch; arguments and result as in `models.protocol.ScheduledDecoder`."""
        options = self.options
        noise_PBF = self.noise_gru(self._patches(self.noise_day, features_BTC, days_B), self.noise_h0)
        clean_BPK = self.clean(self._patches(self.clean_day, features_BTC, days_B) - noise_PBF)
        assert scheduled_N is not None or not self.training, "training needs the strength of the reversal"
        heard_PBF = noise_PBF if scheduled_N is None else reverse_gradient(noise_PBF, scheduled_N[0])
        noisy = AuxiliaryHead(NOISY, self.noisy(heard_PBF), options.noisy_weight)
        steps_B = patch_steps_of(input_bins_B, noise_PBF.shape[0], options.patch_bins, options.patch_stride)
        return DecoderOutput(clean_BPK, steps_B, heads=(noisy,), weight=options.clean_weight)

    def output_steps(self, input_bins: int) -> int:
        """Steps that come out for a trial of `input_bins` bins, at least 1."""
        return patch_steps(input_bins, self.options.patch_bins, self.options.patch_stride)

    def scheduled(self, step: int) -> list[float]:
        """The strength of the gradient reversal in update `step`."""
        options = self.options
        return [options.reversal * ramp(step, options.reversal_warmup_steps, options.reversal_ramp_steps)]

    def _patches(self, day: DayAffine, features_BTC: Tensor, days_B: Tensor) -> Tensor:
        mapped_BTC = dropout(day(features_BTC, days_B), self.options.input_dropout, self.training)
        return patches(mapped_BTC, self.options.patch_bins, self.options.patch_stride)
