"""The options of every piece, and how a configuration combines them. Imports without torch.

Every field is followed by a string that says what it means and in which unit: `streamrl config --explain` prints
it. The first line of a piece's docstring and its `source` are what `streamrl algorithms` prints.

pi is the current policy, mu the behaviour policy that sampled a token, r_t = pi(y_t) / mu(y_t).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from .base import Advantage, Correction, Lag, Length, Loss, Rejection, union

Normalise = Literal["token_mean", "sequence_mean", "constant"]
Level = Literal["token", "sequence"]
Ratio = Annotated[float, Meta(gt=0)]
Tokens = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]


class Grpo(Advantage, frozen=True, kw_only=True, tag="grpo"):
    """A row's reward minus its group's mean; divided by the group's deviation (GRPO) or not (Dr. GRPO)."""

    source = "DeepSeekMath, arXiv 2402.03300, section 4.1.2; Dr. GRPO, arXiv 2503.20783, section 3"
    function = "streamrl_learners.algorithms.advantages:grpo"

    scale: Literal["none", "std"] = "none"
    """Divide by the group's standard deviation (`std`, GRPO), or do not (`none`, Dr. GRPO)."""


class Rloo(Advantage, frozen=True, kw_only=True, tag="rloo"):
    """A row's reward minus the mean of the *other* rows of its group."""

    source = "RLOO, arXiv 2402.14740, eq. 8"
    function = "streamrl_learners.algorithms.advantages:rloo"


class ReinforcePlusPlus(Advantage, frozen=True, kw_only=True, tag="reinforce_plus_plus"):
    """Rewards, or their distance from the group's mean, at mean 0 and deviation 1 over a whole step's tokens."""

    source = "REINFORCE++ and REINFORCE++-baseline, arXiv 2501.03262"
    function = "streamrl_learners.algorithms.advantages:reinforce_plus_plus"
    standardises = True

    baseline: Literal["none", "group"] = "none"
    """Take the mean of its group off each reward first (`group`, REINFORCE++-baseline), or do not (`none`)."""

    @property
    def compares(self) -> bool:
        return self.baseline == "group"


class PPOClip(Loss, frozen=True, kw_only=True, tag="ppo_clip"):
    """PPO's clipped surrogate, with DAPO's asymmetric clip and, by option, the dual clip."""

    source = "PPO, arXiv 1707.06347, eq. 7; DAPO, arXiv 2503.14476, eq. 10; dual clip, arXiv 1912.09729"
    function = "streamrl_learners.algorithms.losses:ppo_clip"

    clip: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """How far the ratio may fall below 1 before it stops to matter."""
    clip_high: Ratio | None = 0.28
    """How far the ratio may rise above 1; null means the same as `clip`."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """Largest ratio that a token of negative advantage counts with (dual clip, often 3); null: none."""


class Reinforce(Loss, frozen=True, kw_only=True, tag="reinforce"):
    """The policy gradient: ratio times advantage, whose gradient is A grad log pi where the ratio is 1."""

    source = "Williams 1992, doi 10.1007/BF00992696"
    function = "streamrl_learners.algorithms.losses:reinforce"
    clips = False


class Gspo(Loss, frozen=True, kw_only=True, tag="gspo"):
    """PPO's clip on one ratio per row, the geometric mean of its tokens'; the paper's mean is `sequence_mean`."""

    source = "GSPO, arXiv 2507.18071, eqs. 5 and 7"
    function = "streamrl_learners.algorithms.losses:gspo"

    clip: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
    """How far a row's ratio may fall below 1; three orders below PPO's, because the mean of many tokens moves less."""
    clip_high: Ratio | None = 4e-4
    """How far a row's ratio may rise above 1; null means the same as `clip`."""


class Cispo(Loss, frozen=True, kw_only=True, tag="cispo"):
    """REINFORCE with a clipped ratio as its weight: every token keeps its gradient, none counts too much."""

    source = "CISPO, MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5"
    function = "streamrl_learners.algorithms.losses:cispo"

    clip: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """How far below 1 the weight is kept from falling; null, as in the paper: it may fall to 0."""
    clip_high: Ratio = 4.0
    """How far the weight may rise above 1 (4 to 8: ScaleRL, arXiv 2510.13786)."""


class NoCorrection(Correction, frozen=True, kw_only=True, tag="none"):
    """Rows are taken as if the current policy had sampled them: right only when nothing is stale."""

    source = "on-policy, by definition"
    function = "streamrl_learners.algorithms.corrections:no_correction"
    corrects = False


class Behaviour(Correction, frozen=True, kw_only=True, tag="behaviour"):
    """The loss's ratio is taken to the policy that sampled the token: r_t itself goes into the loss."""

    source = "PPO, arXiv 1707.06347, with pi_old the policy that sampled"
    function = "streamrl_learners.algorithms.corrections:behaviour"
    proximal = "behaviour"


class TruncatedIS(Correction, frozen=True, kw_only=True, tag="truncated_is"):
    """A token is weighted by min(r_t, cap), or by its row's product of ratios cut off alike; without gradient."""

    source = "Ionides 2008, doi 10.1198/106186008X320456; on tokens: https://fengyao.notion.site/off-policy-rl"
    function = "streamrl_learners.algorithms.corrections:truncated_is"

    level: Level = "token"
    """Ratio of each token, or the product over all sampled tokens of the row, for every token in it."""
    cap: Ratio = 2.0
    """Largest importance weight."""


class MaskedIS(Correction, frozen=True, kw_only=True, tag="masked_is"):
    """A token is weighted by r_t inside a band and by 0 outside it (IcePop); per row: masked IS."""

    source = "IcePop, Ring-1T, arXiv 2510.18855; masked IS: Liu et al. 2025, When Speed Kills Stability"
    function = "streamrl_learners.algorithms.corrections:masked_is"

    level: Level = "token"
    """Ratio of each token, or the product over all sampled tokens of the row, for every token in it."""
    low: Annotated[float, Meta(ge=0)] = 0.5
    """Smallest ratio that counts; 0 masks high ones only."""
    high: Ratio = 5.0
    """Largest ratio that counts."""


class Decoupled(Correction, frozen=True, kw_only=True, tag="decoupled"):
    """Decoupled PPO: the ratio is taken to a policy between mu and pi by the token's lag, the rest is a weight."""

    source = "decoupled PPO, arXiv 2110.00641; interpolated proximal policy: A-3PO, arXiv 2512.06547"
    function = "streamrl_learners.algorithms.corrections:decoupled"
    proximal = "between"

    cap: Ratio = 2.0
    """Largest importance weight pi_prox / mu of a token."""


class SequenceRejection(Rejection, frozen=True, kw_only=True, tag="sequence"):
    """A row is left out when the product of its tokens' ratios is outside a band."""

    source = "Liu et al. 2025, When Speed Kills Stability (sequence rejection)"
    function = "streamrl_learners.algorithms.rejections:sequence"

    low: Annotated[float, Meta(ge=0)] = 0.0
    """Smallest product of ratios of a row that is trained."""
    high: Ratio = 10.0
    """Largest product of ratios of a row that is trained."""


class GeometricRejection(Rejection, frozen=True, kw_only=True, tag="geometric"):
    """A row is left out when the geometric mean of its tokens' ratios is outside a band, whatever its length."""

    source = "Liu et al. 2025, When Speed Kills Stability (geometric rejection)"
    function = "streamrl_learners.algorithms.rejections:geometric"

    low: Annotated[float, Meta(ge=0)] = 0.99
    """Smallest geometric mean of a row's ratios that is trained."""
    high: Ratio = 1.01
    """Largest geometric mean of a row's ratios that is trained."""


class LagMask(Lag, frozen=True, kw_only=True, tag="mask"):
    """Tokens that are too many steps old are read and not trained, as if a tool had written them."""

    source = "an indicator of the lag, by definition"
    function = "streamrl_learners.algorithms.lags:mask"

    max_lag: Annotated[int, Meta(ge=0)] = 1
    """Largest lag of a token that is trained, in steps; below queue.max_staleness, which bounds whole rows."""


class LagDecay(Lag, frozen=True, kw_only=True, tag="decay"):
    """A token counts max(1, lag)^-power: its share of the step falls with its age."""

    source = "staleness-aware SGD, arXiv 1511.05950 (power 1)"
    function = "streamrl_learners.algorithms.lags:decay"

    power: Annotated[float, Meta(gt=0)] = 1.0
    """How fast the weight falls: 1 halves a token of lag 2, 0.5 halves one of lag 4."""


class SoftOverlong(Length, frozen=True, kw_only=True, tag="soft_overlong"):
    """Off the reward of a row in the last `buffer_tokens` before the limit: linearly, to `scale` at the limit."""

    source = "DAPO, arXiv 2503.14476, eq. 13"
    function = "streamrl_learners.algorithms.lengths:soft_overlong"

    max_tokens: Tokens
    """The limit: tokens of a row, prompt and tools' answers included, as rollout.max_tokens counts them."""
    buffer_tokens: Tokens
    """Tokens before the limit in which the penalty grows; at most `max_tokens`."""
    scale: Annotated[float, Meta(gt=0)] = 1.0
    """What a row at the limit loses, in units of reward."""


if TYPE_CHECKING:
    AdvantageConfig: TypeAlias = Grpo | Rloo | ReinforcePlusPlus
    LossConfig: TypeAlias = PPOClip | Reinforce | Gspo | Cispo
    CorrectionConfig: TypeAlias = NoCorrection | Behaviour | TruncatedIS | MaskedIS | Decoupled
    RejectionConfig: TypeAlias = SequenceRejection | GeometricRejection
    LagConfig: TypeAlias = LagMask | LagDecay
    LengthConfig: TypeAlias = SoftOverlong
else:
    AdvantageConfig = union(Advantage, (Grpo, Rloo, ReinforcePlusPlus))
    LossConfig = union(Loss, (PPOClip, Reinforce, Gspo, Cispo))
    CorrectionConfig = union(Correction, (NoCorrection, Behaviour, TruncatedIS, MaskedIS, Decoupled))
    RejectionConfig = union(Rejection, (SequenceRejection, GeometricRejection))
    LagConfig = union(Lag, (LagMask, LagDecay))
    LengthConfig = union(Length, (SoftOverlong,))


class Algorithm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece of each kind: loss_t = -w_t L(pi / pi_prox, A_t), summed over a step and divided by its normaliser."""

    advantage: AdvantageConfig = Grpo()
    """How rewards of a group become advantages. `streamrl algorithms` lists the pieces of every kind."""
    loss: LossConfig = PPOClip()
    """What is maximised, token by token, given ratio and advantage."""
    correction: CorrectionConfig = Behaviour()
    """How being off-policy is corrected: which policy the ratio is taken to, and a weight per token."""
    rejection: RejectionConfig | None = None
    """Which rows are left out because the current policy is too far from the one that sampled them; null: none."""
    lag: LagConfig | None = None
    """What a token counts by its own lag in steps; null: all alike."""
    length: LengthConfig | None = None
    """What is taken off the reward of long rows; null: nothing."""
    entropy: Annotated[float, Meta(ge=0)] = 0.0
    """Coefficient of the policy's entropy (nats per sampled token, full vocabulary) in what is maximised."""
    normalise: Normalise = "token_mean"
    """Mean over all sampled tokens of a step, over rows of each row's token mean, or a fixed length per row."""
    normalise_length: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] | None = None
    """Tokens that one row counts for under `normalise: constant` (Dr. GRPO); unused otherwise."""

    @property
    def computes_all(self) -> bool:
        """Whether rows without an advantage matter too: for their entropy, or because they may be rejected."""
        return self.entropy > 0 or self.rejection is not None
