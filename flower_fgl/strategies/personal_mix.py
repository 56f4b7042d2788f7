"""Server halves that average the models separately for each client.

A method says how alike two clients are, and how that becomes a weight. The rule is in
:mod:`flower_fgl.algorithms.personal_mix`.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor, nn

from flower_fgl.algorithms import personal_mix, topfgl
from flower_fgl.algorithms.fedaux import DIRECTION
from flower_fgl.algorithms.fediih import factor_similarity
from flower_fgl.algorithms.personal_mix import (
    Part,
    cosine_similarity,
    linear_weights,
    softmax_weights,
    threshold_weights,
)
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import PayloadError
from flower_fgl.core.model_spec import read_model
from flower_fgl.core.seeds import SERVER, torch_generator
from flower_fgl.methods.fedaux import FedAuxSettings
from flower_fgl.methods.fedgta import FedGTASettings
from flower_fgl.methods.fediih import FedIIHSettings
from flower_fgl.methods.fedpub import FedPubSettings, PersonalMixSettings
from flower_fgl.methods.topfgl import TopFGLSettings
from flower_fgl.nn import Backbone
from flower_fgl.nn.backbone import copy_network
from flower_fgl.nn.stacked import SharedInput, can_stack, stack_model
from flower_fgl.protocols.fedavg import DescribedWeights, Weights
from flower_fgl.protocols.weights import EmbeddedWeights, MomentWeights
from flower_fgl.strategies.base import Upload
from flower_fgl.strategies.fedavg import FedAvg, common_model, draw_model

__all__ = ["FedAux", "FedGTA", "FedIIH", "FedPub", "PersonalMix", "TopFGL"]
__all__ += ["client_attention", "cosines", "factor_parts"]

MOST_IN_TABLE = 50
"""Clients in a round up to which the run folder holds the matrix of their mixtures."""


class PersonalMix(FedAvg):
    """Send each client its own weighted mean of the last round's models.

    A method overrides :meth:`similarity` and :meth:`attention`, and where needed
    :meth:`parts` and :meth:`mixes`.

    Notes
    -----
    1. Uploads are sorted by partition-id, so that the order of replies has no effect.
    2. A client that was not in the last mix starts from the average of that round's
       uploads, weighted by ``weight-by``; with ``absent = "last"`` from its own last
       mixture, if it has one.
    3. There is no global model: that average is never evaluated.
    4. An upload with a number that is not finite is refused when it is read. A client
       whose numbers are so large that its similarities are not finite is named and left
       out.
    """

    kept = ("personal",)

    def prepare(self) -> None:
        """Build the initial model."""
        super().prepare()
        self.personal: dict[int, Mapping[str, Tensor]] = {}

    @abstractmethod
    def similarity(self, uploads: Sequence[Any]) -> Tensor:
        """Return S of shape (K, K) or (B, K, K) of the payloads of K clients."""

    @abstractmethod
    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the weights a, of the shape of ``similarity``; each row sums to 1."""

    def parts(self) -> Mapping[str, Sequence[personal_mix.Part]] | None:
        """Return which block averages which part of a parameter; ``None``: the first."""
        return None

    def mixes(self, server_round: int) -> bool:
        """Return whether this round personalizes; else all clients get the mean."""
        return True

    def download(self, server_round: int, partition_id: int) -> Weights:
        """Return w_i, or the average for a client that was not in the last mix."""
        own = self.personal.get(partition_id)
        return self.weights if own is None else Weights(own)

    def aggregate(self, server_round: int, uploads: Mapping[int, Upload]) -> None:
        """Mix the uploads for each client."""
        super().aggregate(server_round, uploads)
        if not self.mixes(server_round):
            self.personal = {}
            return
        found = list(uploads.values())
        payloads = [upload.payload for upload in found]
        similarity = self.similarity(payloads)
        if not similarity.isfinite().all():
            raise PayloadError("a similarity of two clients is not finite")
        attention = self.attention(similarity, found)
        states = [payload.tensors for payload in payloads]
        mixed = personal_mix.mix_states(states, attention.float(), self.parts())
        made = dict(zip(uploads, mixed, strict=True))
        settings: PersonalMixSettings = self.config.method_config
        kept = self.personal if settings.absent == "last" else {}
        self.personal = {**kept, **made}
        self.log(**personal_mix.mix_numbers(attention, similarity))
        if len(uploads) <= MOST_IN_TABLE:
            self.loop.log.tables["mixture"] = personal_mix.mixture_table(
                list(uploads), attention
            )

    def to_blame(self, uploads: Mapping[int, Upload]) -> dict[int, str]:
        """Return the clients that have no finite similarity, not even to themselves."""
        try:
            found = self.similarity([upload.payload for upload in uploads.values()])
        except Exception:  # it may be what failed
            return super().to_blame(uploads)
        rows = found.isfinite().any(dim=-1)
        is_fine = rows.all(dim=0) if rows.dim() == 2 else rows
        broken = [pid for pid, fine in zip(uploads, is_fine, strict=True) if not fine]
        if not broken:
            return super().to_blame(uploads)
        return dict.fromkeys(broken, "none of its similarities is finite")


def cosines(embeddings: Tensor) -> Tensor:
    """Compute S_ij = cos(o_i, o_j) of embeddings (K, p), 0 for a zero row, Baek et al."""
    unit = F.normalize(embeddings, dim=1)
    return unit @ unit.T


def client_attention(similarity: Tensor, *, tau: float) -> Tensor:
    """Compute a_ij = e^{τ·S_ij} / Σ_l e^{τ·S_il} from S (K, K), Baek et al., Eq. (4).

    τ = 0 gives the plain mean; with large values each client keeps its own weights.
    """
    return (tau * similarity).softmax(dim=1)


class FedPub(PersonalMix):
    """Average weights of clients whose models give similar outputs on a random graph.

    Notes
    -----
    1. In the paper the server keeps the random graph. Here each client draws it from the
       run's seed, which saves sending the 4·500·d bytes of the graph.
    """

    config: RunConfig[FedPubSettings]
    up = EmbeddedWeights

    def prepare(self) -> None:
        """Build the initial model."""
        super().prepare()
        named = read_model(common_model(self.config, self.federation)).hidden_channels
        self.width = named or self.config.hidden_channels

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and of the embedding."""
        return self.shapes, (self.width,)

    def similarity(self, uploads: Sequence[EmbeddedWeights]) -> Tensor:
        """Return the cosines of the proxy embeddings, float32."""
        return cosines(torch.stack([payload.embedding for payload in uploads]))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the softmax of τ times the cosines, float32."""
        return client_attention(similarity, tau=self.config.method_config.tau)


class FedAux(PersonalMix):
    """Mix all weights, directions included, by the cosine of the directions.

    Notes
    -----
    1. The text of the paper recommends α = 1. The default is 10, as in its appendix, its
       tables and the published code.
    """

    config: RunConfig[FedAuxSettings]
    averages_network = True

    def similarity(self, uploads: Sequence[Weights]) -> Tensor:
        """Return the cosines of the directions."""
        rows = [payload.tensors[DIRECTION] for payload in uploads]
        self.log(direction_norm=float(torch.stack(rows).norm(dim=1).mean()))
        return cosine_similarity(torch.stack(rows))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the softmax of α times the cosines."""
        return softmax_weights(similarity, scale=self.config.method_config.alpha)


class FedGTA(PersonalMix):
    """Average each client with its partners, weighted by their confidence.

    Notes
    -----
    1. Two clients are partners if the cosine of their moments is at least ε; the
       published code asks for more than ε.
    2. A client without edges has confidence 0: it keeps its own model, and its partners
       do not count it.
    3. A confidence below 0 counts as 0. Clients report it, so a client can raise its own
       weight.
    """

    config: RunConfig[FedGTASettings]
    up = MomentWeights

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights, and of moments and confidence."""
        settings = self.config.method_config
        rows = settings.orders * (2 if settings.moments == "hybrid" else 1)
        moments = rows, self.federation.num_classes
        return self.shapes, {"moments": moments, "confidence": (1,)}

    def similarity(self, uploads: Sequence[MomentWeights]) -> Tensor:
        """Return the cosines of the moments."""
        rows = [payload.descriptor["moments"].flatten() for payload in uploads]
        return cosine_similarity(torch.stack(rows))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the confidence of the partners, in shares."""
        found = [upload.payload.descriptor["confidence"] for upload in uploads]
        confidence = torch.cat(found).double().clamp(min=0)
        # without partners a client keeps its own model
        similarity = similarity.where(confidence[:, None] > 0, -torch.inf)
        return threshold_weights(
            similarity, confidence, least=self.config.method_config.threshold
        )


class FedIIH(PersonalMix):
    """Mix the columns of each factor by the similarity of its summaries.

    Notes
    -----
    1. A factor's block is its part of both weight matrices and of the first bias. The
       last bias is averaged with equal weights.
    2. A similarity below 0 is kept as it is.
    """

    config: RunConfig[FedIIHSettings]
    up = DescribedWeights
    averages_network = True

    def upload_spec(self, partition_id: int) -> Any:
        """Return the shapes of the weights and of the summaries."""
        factors = self.config.method_config.factors
        return self.shapes, {"mean": (factors, self.config.hidden_channels)}

    def similarity(self, uploads: Sequence[DescribedWeights]) -> Tensor:
        """Return one matrix per factor; mean and log-variance are one vector."""
        mean = torch.stack([payload.descriptor["mean"] for payload in uploads])
        return factor_similarity(mean, mean)

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return the softmax of the similarities times ``scale``."""
        return softmax_weights(similarity, scale=self.config.method_config.scale)

    def parts(self) -> Mapping[str, Sequence[Part]]:
        """Return the slices of each factor."""
        return factor_parts(
            self.config.method_config.factors, self.config.hidden_channels
        )


def factor_parts(factors: int, width: int) -> dict[str, list[Part]]:
    """Return which slice of each parameter belongs to which factor."""
    axes = {"encoder.weight": 0, "encoder.bias": 0, "classifier.weight": 1}
    return {
        name: [Part(f, axis, f * width, (f + 1) * width) for f in range(factors)]
        for name, axis in axes.items()
    }


class TopFGL(PersonalMix):
    """Run all learners on one random graph, and compare their outputs by linear CKA.

    Notes
    -----
    1. The random graph holds no client's data: the server draws the same one in every
       round, from the run's seed.
    2. The first rounds, a share ``warmup`` of all, average by ``weight-by``.
    """

    config: RunConfig[TopFGLSettings]

    def build(self, model: str) -> nn.Module:
        """Draw the network as FedAvg does, then the learner."""
        drawn: Backbone = draw_model(self.config, self.federation, model)
        drawn.learner = topfgl.TopologyLearner(
            self.federation.num_classes, drawn.hidden_channels, self.config.dropout
        )
        self.network = copy_network(drawn)  # its weights are overwritten
        return drawn

    def mixes(self, server_round: int) -> bool:
        """Return whether the warm-up is over."""
        settings = self.config.method_config
        if settings.warmup == 1:
            return False
        # a product like .55 · 100 is a little above the whole number
        first: int = math.ceil(round(settings.warmup * self.config.rounds, 9))
        return server_round >= first

    @torch.no_grad()
    def similarity(self, uploads: Sequence[Weights]) -> Tensor:
        """Return the CKA of the learners' outputs."""
        generator = torch_generator(self.config.seed, 0, SERVER, "probe")
        probe = topfgl.probe_graph(self.federation.num_features, generator)
        structure = probe.with_features(topfgl.structural_encoding(probe))
        states = [payload.tensors for payload in uploads]
        if can_stack(self.network):
            network = stack_model(self.network, states, len(states))
            network.eval()
            logits = network(SharedInput(probe))
            outputs = network.get_submodule("learner")(SharedInput(structure), logits)
            return topfgl.linear_cka(outputs)
        network, found = self.network.eval(), []
        for state in states:
            network.load_state_dict(dict(state))
            learner = network.get_submodule("learner")
            found.append(learner(structure, network(probe)))
        return topfgl.linear_cka(torch.stack(found))

    def attention(self, similarity: Tensor, uploads: Sequence[Upload]) -> Tensor:
        """Return weights in proportion to the CKA."""
        return linear_weights(similarity)
