"""Small networks of many families, on which to see what a session leaves exact: by library, or written here.

Which tensors a network saves depends on its ops alone, so widths and batches are small. Those written here stand for
families that the libraries do not have: recurrent nets, flows, adversarial nets, spectral operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from evidence.zoo import CLASSES, WORDS, Case, Subject, vision


def _case(model: nn.Module, loss: Callable[[], Tensor]) -> Case:
    return Case(model, lambda change: loss())


def _timm(name: str, count: int = 4, size: int = 64, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        vision()
        import timm

        model = timm.create_model(name, num_classes=CLASSES, **options)
        x, y = torch.randn(count, 3, size, size), torch.randint(CLASSES, (count,))
        return _case(model, lambda: F.cross_entropy(model(x), y))

    return build


_SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 256}
_EXPERTS = {**_SMALL, "num_key_value_heads": 2, "use_cache": False, "output_router_logits": False}


def _language(
    model: str, config: str, dtype: torch.dtype = torch.float32, length: int = 128, **sizes: Any
) -> Callable[[], Case]:
    """A language model that learns to repeat its input, four rows of ``length`` words."""

    def build() -> Case:
        vision()
        import transformers

        network = getattr(transformers, model)(getattr(transformers, config)(vocab_size=WORDS, **sizes)).to(dtype)
        tokens = torch.randint(WORDS, (4, length))
        return _case(network, lambda: network(input_ids=tokens, labels=tokens).loss)

    return build


def _llama(dtype: torch.dtype, lora: bool, dropout: float = 0.05) -> Callable[[], Case]:
    """A model like Llama's, as it is tuned: all weights, or adapters on queries, values and the feed-forward part."""

    def build() -> Case:
        vision()
        import transformers

        sizes = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8}
        config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=4, use_cache=False, **sizes)
        network: Any = transformers.LlamaForCausalLM(config).to(dtype)
        if lora:
            import peft

            on = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
            adapters = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=dropout, target_modules=on)
            network = peft.get_peft_model(network, adapters, autocast_adapter_dtype=False)
            for name, parameter in network.named_parameters():
                if "lora_B" in name:  # zero at first, and then nothing reaches the other half
                    nn.init.normal_(parameter, std=0.02)
        tokens = torch.randint(WORDS, (4, 256))
        return _case(network, lambda: network(input_ids=tokens, labels=tokens).loss)

    return build


def _t5() -> Case:
    vision()
    import transformers

    config = transformers.T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    network = transformers.T5ForConditionalGeneration(config)
    tokens = torch.randint(WORDS, (4, 64))
    return _case(network, lambda: network(input_ids=tokens, labels=tokens).loss)


def _speech() -> Case:
    vision()
    import transformers

    config = transformers.Wav2Vec2Config(**_SMALL, conv_dim=(64,) * 7, mask_time_prob=0.0, layerdrop=0.0)
    network = transformers.Wav2Vec2ForSequenceClassification(config)
    sound, label = torch.randn(2, 8000), torch.randint(2, (2,))
    return _case(network, lambda: network(input_values=sound, labels=label).loss)


def _diffusion() -> Case:
    vision()
    import diffusers

    down = ("DownBlock2D", "AttnDownBlock2D")
    network = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        layers_per_block=1,
        down_block_types=down,
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    x, noise, when = torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32), torch.randint(1000, (2,))
    return _case(network, lambda: F.mse_loss(network(x + noise, when).sample, noise))


def _autoencoder() -> Case:
    vision()
    import diffusers

    network = diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    x = torch.randn(2, 3, 32, 32)

    def loss() -> Tensor:
        hidden = network.encode(x).latent_dist
        return F.mse_loss(network.decode(hidden.sample()).sample, x) + 1e-3 * hidden.kl().mean()

    return _case(network, loss)


def _monai(name: str, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        vision()
        import monai.networks.nets as nets

        network = getattr(nets, name)(**options)
        x, y = torch.randn(2, 1, 32, 32, 32), torch.randint(2, (2, 32, 32, 32))
        return _case(network, lambda: F.cross_entropy(network(x), y))

    return build


def _graph(layer: str, **options: Any) -> Callable[[], Case]:
    """Two layers on a random graph of 1000 nodes with 8000 edges."""

    def build() -> Case:
        vision()
        import torch_geometric.nn as layers

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.norm, self.second = self._layer(32, 64), nn.BatchNorm1d(64), self._layer(64, 64)
                self.out = nn.Linear(64, CLASSES)

            def _layer(self, inputs: int, outputs: int) -> nn.Module:
                def net(size: int) -> nn.Module:
                    return nn.Sequential(nn.Linear(size, outputs), nn.ReLU(), nn.Linear(outputs, outputs))

                if layer == "GINConv":
                    return layers.GINConv(net(inputs), train_eps=True)
                if layer == "EdgeConv":
                    return layers.EdgeConv(net(2 * inputs))
                return getattr(layers, layer)(inputs, outputs, **options)

            def forward(self, x: Tensor, edges: Tensor) -> Tensor:
                return self.out(F.relu(self.second(F.relu(self.norm(self.first(x, edges))), edges)))

        network = Net()
        x, edges, y = torch.randn(1000, 32), torch.randint(1000, (2, 8000)), torch.randint(CLASSES, (1000,))
        return _case(network, lambda: F.cross_entropy(network(x, edges), y))

    return build


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 64)
        self.layers = kind(64, 128, 2, batch_first=True, **options)
        self.out = nn.Linear(128 * (2 if self.layers.bidirectional else 1), WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.layers(self.table(tokens))[0])


def _recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        network, tokens = _Recurrent(kind, **options), torch.randint(WORDS, (8, 64))
        return _case(network, lambda: F.cross_entropy(network(tokens).flatten(0, 1), tokens.flatten()))

    return build


def _critic(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    def step(inputs: int, outputs: int) -> list[nn.Module]:
        return [norm(nn.Conv2d(inputs, outputs, 4, 2, 1)), nn.LeakyReLU(0.2)]

    return nn.Sequential(*step(3, 32), *step(32, 64), *step(64, 128), nn.Flatten(), norm(nn.Linear(2048, 1)))


def _adversarial() -> Case:
    def step(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.BatchNorm2d(outputs), nn.ReLU()]

    start = [nn.Linear(64, 2048), nn.Unflatten(1, (128, 4, 4))]
    painter = nn.Sequential(*start, *step(128, 64), *step(64, 32), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh())
    critic = _critic(spectral_norm)
    z, real = torch.randn(8, 64), torch.randn(8, 3, 32, 32)
    return _case(nn.ModuleList([painter, critic]), lambda: F.softplus(-critic(painter(z)) + critic(real)).mean())


def _penalty() -> Case:
    """A critic whose gradient by its input is held near a length of one: backward runs through a backward."""
    critic = _critic(lambda layer: layer)
    x = torch.randn(8, 3, 32, 32)

    def loss() -> Tensor:
        at = x.clone().requires_grad_()
        score = critic(at).sum()
        (slope,) = torch.autograd.grad(score, at, create_graph=True)
        return score + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()

    return _case(critic, loss)


class _Coupling(nn.Module):
    """Half of the channels scale and shift the others."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 12, 3, padding=1)]
        self.net = nn.Sequential(nn.Conv2d(6, 64, 3, padding=1), nn.ReLU(), *hidden)
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(12, 12))[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.conv2d(x, self.mix[:, :, None, None])
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        volume = scale.log().flatten(1).sum(1) + torch.linalg.slogdet(self.mix)[1] * x[0, 0].numel()
        return torch.cat([a, (b + shift) * scale], 1), volume


def _flow() -> Case:
    network, x = nn.ModuleList([_Coupling() for _ in range(4)]), torch.randn(8, 12, 16, 16)

    def loss() -> Tensor:
        z, volumes = x, torch.zeros(len(x))
        for step in network:
            z, volume = step(z)
            volumes = volumes + volume
        return (z.square().flatten(1).sum(1) / 2 - volumes).mean() / x[0].numel()

    return _case(network, loss)


class _Spectral(nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies are mixed by complex weights."""

    def __init__(self, width: int, modes: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat) / width)
        self.local, self.modes = nn.Conv2d(width, width, 1), modes

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.fft.rfft2(x)[..., : self.modes, : self.modes]
        mixed = torch.einsum("bixy,ioxy->boxy", seen, self.weight)
        return F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.local(x))


def _operator() -> Case:
    layers = [_Spectral(32) for _ in range(3)]
    network = nn.Sequential(nn.Conv2d(1, 32, 1), *layers, nn.Conv2d(32, 1, 1))
    x = torch.randn(4, 1, 32, 32)
    return _case(network, lambda: F.mse_loss(network(x), x.roll(1, -1)))


class _Warped(nn.Module):
    """A net that finds a field of displacements and moves its input by it, as image registration does."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Conv2d(3, 32, 3, padding=1), nn.PReLU(32), nn.Conv2d(32, 32, 3, padding=1), nn.PReLU()]
        self.net = nn.Sequential(*hidden, nn.Conv2d(32, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        axes = torch.linspace(-1, 1, x.shape[-2]), torch.linspace(-1, 1, x.shape[-1])
        here = torch.stack(torch.meshgrid(*axes, indexing="ij")[::-1], -1)
        features = self.net(x)
        return F.grid_sample(x * features.mean(1, keepdim=True), here + features.movedim(1, -1), align_corners=True)


def _registration() -> Case:
    network, x = _Warped(), torch.randn(4, 3, 32, 32)
    return _case(network, lambda: F.mse_loss(network(x), x.roll(1, -1)))


class _Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Conv1d(1, 64, 7, padding=3))
        self.layers = nn.ModuleList(weight_norm(nn.Conv1d(64, 128, 3, padding=2**i, dilation=2**i)) for i in range(4))
        self.out = nn.Conv1d(64, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            a, b = layer(x).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return self.out(x)


def _waves() -> Case:
    network, x = _Waves(), torch.randn(4, 1, 1024)
    return _case(network, lambda: F.mse_loss(network(x), x.roll(-1, -1)))


class _Contrast(nn.Module):
    """Two views of an image are drawn together: unit vectors, a temperature, distances."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
        self.head, self.heat = nn.Linear(64, 64), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        places = self.head(self.net(x).flatten(2).transpose(1, 2))
        return F.normalize(places, dim=-1) * self.heat.exp()


def _contrast() -> Case:
    network, x = _Contrast(), torch.randn(8, 3, 32, 32)

    def loss() -> Tensor:
        a, b = network(x).amax(1), network(x + 0.1).mean(1)
        near = torch.maximum(torch.cdist(a, b), torch.sqrt((a - b).square().sum(-1) + 1e-3))
        return F.cross_entropy(a @ b.t(), torch.arange(len(x))) + near.mean()

    return _case(network, loss)


_BLOOM = {"n_layer": 2, "n_head": 4, "hidden_size": 128}
_DEEPSEEK: dict[str, Any] = {
    **{**_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "q_lora_rank": 32},
    **{"kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
}
_DEEPSEEK.pop("output_router_logits")
_MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}
_UNET3 = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
_HEADS = {**_SMALL, "num_key_value_heads": 2, "use_cache": False}
_QWEN_MOE = {**_EXPERTS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}

FAMILIES: Mapping[str, Subject] = {
    name: Subject(title, library, batch, build)
    for name, title, library, batch, build in (
        ("resnet", "ResNet-26", "timm", "4 of 64 px", _timm("resnet26")),
        ("efficientnet", "EfficientNet-B0", "timm", "4 of 64 px", _timm("efficientnet_b0")),
        ("convnext", "ConvNeXt-Atto", "timm", "4 of 64 px", _timm("convnext_atto")),
        ("vit", "ViT-Ti/16", "timm", "4 of 96 px", _timm("vit_tiny_patch16_224", size=96, img_size=96, depth=4)),
        ("swin", "SwinV2-T", "timm", "2 of 64 px", _timm("swinv2_tiny_window8_256", 2, img_size=64)),
        ("nfnet", "NFNet-L0", "timm", "4 of 64 px", _timm("nfnet_l0")),
        ("nf_resnet", "NF-ResNet-26", "timm", "4 of 64 px", _timm("nf_resnet26")),
        ("bit", "ResNetV2-50, weight standardised", "timm", "2 of 64 px", _timm("resnetv2_50x1_bit", 2)),
        ("xcit", "XCiT-Nano", "timm", "2 of 64 px", _timm("xcit_nano_12_p16_224", 2, img_size=64)),
        (
            "unet3d",
            "3-D U-Net, PReLU",
            "monai",
            "2 of 32^3",
            _monai("UNet", **_UNET3, channels=(8, 16, 32), strides=(2, 2)),
        ),
        ("segresnet", "SegResNet", "monai", "2 of 32^3", _monai("SegResNet", init_filters=8)),
        ("bert", "BERT", "transformers", "4 of 128", _language("BertForMaskedLM", "BertConfig", **_SMALL)),
        (
            "deberta",
            "DeBERTa-v2",
            "transformers",
            "4 of 128",
            _language("DebertaV2ForMaskedLM", "DebertaV2Config", **_SMALL),
        ),
        (
            "gpt2",
            "GPT-2",
            "transformers",
            "4 of 128",
            _language("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_head=4, n_embd=128),
        ),
        ("bloom", "Bloom", "transformers", "4 of 128", _language("BloomForCausalLM", "BloomConfig", **_BLOOM)),
        ("llama", "Llama", "transformers", "4 of 128", _language("LlamaForCausalLM", "LlamaConfig", **_HEADS)),
        ("mistral", "Mistral", "transformers", "4 of 128", _language("MistralForCausalLM", "MistralConfig", **_HEADS)),
        (
            "qwen3",
            "Qwen3",
            "transformers",
            "4 of 128",
            _language("Qwen3ForCausalLM", "Qwen3Config", **_HEADS, head_dim=32),
        ),
        (
            "gemma2",
            "Gemma 2",
            "transformers",
            "4 of 128",
            _language("Gemma2ForCausalLM", "Gemma2Config", **_HEADS, head_dim=32),
        ),
        (
            "gemma3",
            "Gemma 3",
            "transformers",
            "4 of 128",
            _language("Gemma3ForCausalLM", "Gemma3TextConfig", **_HEADS, head_dim=32),
        ),
        (
            "mixtral",
            "Mixtral",
            "transformers",
            "4 of 128",
            _language("MixtralForCausalLM", "MixtralConfig", **_EXPERTS, num_local_experts=4),
        ),
        (
            "qwen3moe",
            "Qwen3-MoE",
            "transformers",
            "4 of 128",
            _language("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_QWEN_MOE),
        ),
        (
            "deepseek",
            "DeepSeek-V3",
            "transformers",
            "4 of 128",
            _language("DeepseekV3ForCausalLM", "DeepseekV3Config", **_DEEPSEEK),
        ),
        (
            "gptoss",
            "gpt-oss",
            "transformers",
            "4 of 128",
            _language(
                "GptOssForCausalLM", "GptOssConfig", **_EXPERTS, head_dim=32, num_local_experts=4, num_experts_per_tok=2
            ),
        ),
        (
            "mamba",
            "Mamba",
            "transformers",
            "4 of 32",
            _language("MambaForCausalLM", "MambaConfig", length=32, **_MAMBA),
        ),
        ("t5", "T5", "transformers", "4 of 64", _t5),
        ("wav2vec2", "wav2vec 2.0", "transformers", "2 of 8000", _speech),
        ("llama-bf16", "Llama in bfloat16, all weights", "transformers", "4 of 256", _llama(torch.bfloat16, False)),
        ("lora-bf16", "Llama in bfloat16, LoRA", "peft", "4 of 256", _llama(torch.bfloat16, True)),
        ("lora-fp32", "Llama in float32, LoRA", "peft", "4 of 256", _llama(torch.float32, True)),
        ("ddpm", "Diffusion U-Net", "diffusers", "2 of 32 px", _diffusion),
        ("vae", "Autoencoder of latent diffusion", "diffusers", "2 of 32 px", _autoencoder),
        ("gcn", "GCN", "PyG", "1000 nodes", _graph("GCNConv")),
        ("sage", "GraphSAGE, max", "PyG", "1000 nodes", _graph("SAGEConv", aggr="max")),
        ("gat", "GAT", "PyG", "1000 nodes", _graph("GATConv")),
        ("gin", "GIN", "PyG", "1000 nodes", _graph("GINConv")),
        ("edgeconv", "EdgeConv", "PyG", "1000 nodes", _graph("EdgeConv")),
        ("transformerconv", "Graph transformer", "PyG", "1000 nodes", _graph("TransformerConv")),
        ("lstm", "LSTM, 2 layers", "torch", "8 of 64", _recurrent(nn.LSTM)),
        (
            "bilstm",
            "LSTM, both directions, dropout",
            "torch",
            "8 of 64",
            _recurrent(nn.LSTM, bidirectional=True, dropout=0.2),
        ),
        ("gru", "GRU, 2 layers", "torch", "8 of 64", _recurrent(nn.GRU)),
        ("rnn", "RNN, 2 layers", "torch", "8 of 64", _recurrent(nn.RNN)),
        ("gan", "GAN, spectral norm", "torch", "8 of 32 px", _adversarial),
        ("penalty", "Critic with gradient penalty", "torch", "8 of 32 px", _penalty),
        ("flow", "Flow of couplings", "torch", "8 of 16 px", _flow),
        ("fno", "Fourier neural operator", "torch", "4 of 32 px", _operator),
        ("warp", "Registration, grid samples", "torch", "4 of 32 px", _registration),
        ("waves", "WaveNet, weight norm", "torch", "4 of 1024", _waves),
        ("contrast", "Contrastive net", "torch", "8 of 32 px", _contrast),
    )
}
