"""Networks that nobody here wrote, built small.

Hides: which package builds a network from which configuration. Promises: the same weights for the
same seed, inputs that fit, and that a package is imported only when one of its networks is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Any
Maker = Callable[[], Inputs]


@dataclass(frozen=True)
class Network:
    """A network, what it is fed, and whether it attends to a sequence of tokens."""

    package: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Maker
    transformer: bool = False

    @property
    def label(self) -> str:
        return f"{self.package}/{self.name}"

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().eval()


def load(path: str) -> Any:
    """What "package.module:name" is."""
    _define_torchvision_operations()
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


@cache
def _define_torchvision_operations() -> None:
    """torchvision asks for operations of its own, which fit the build of torch that it knows.

    They are for the boxes of detectors; no network here calls them.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            arguments = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", arguments)


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def floats(*shapes: tuple[int, ...]) -> Maker:
    """Random numbers of these shapes, batch included."""
    return lambda: tuple(drawn(shape, seed) for seed, shape in enumerate(shapes))


def images(size: int = 32, channels: int = 3, batch: int = 2) -> Maker:
    return floats((batch, channels, size, size))


def volumes(size: int = 32, channels: int = 1) -> Maker:
    return floats((1, channels, size, size, size))


def ids(length: int = 7, vocabulary: int = 41, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (2, length), generator=generator)


def tokens(length: int = 7) -> Maker:
    return lambda: (ids(length),)


def seq2seq(length: int = 7) -> Maker:
    """Source tokens, the mask over them, and target tokens."""
    return lambda: (ids(length), torch.ones(2, length, dtype=torch.long), ids(5, seed=1))


def network(
    path: str, inputs: Maker, *args: Any, label: str = "", transformer: bool = False, **options: Any
) -> Network:
    """The network that a class or function of a package makes with these arguments."""
    package, name = path.partition(".")[0].partition(":")[0], label or path.partition(":")[2]
    return Network(package, name, lambda: load(path)(*args, **options), inputs, transformer)


# --- torch ------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """A recurrent network of torch over a sequence, and a layer that reads its last output."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


class Tutorial(nn.Module):
    """The language model of PyTorch's tutorial: an encoder under a causal mask."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 36, norm_first=norm_first, batch_first=True)
        self.embedding = nn.Embedding(41, 24)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(24, 41)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(self.encoder(self.embedding(x), mask, is_causal=True))


def recurrent(name: str, **options: Any) -> Network:
    label = name + "".join(f", {key}={value}" for key, value in options.items())
    width = options.get("proj_size", 9) * (2 if options.get("bidirectional") else 1)

    def make() -> nn.Module:
        return Sequence(getattr(nn, name)(5, 9, batch_first=True, **options), width)

    return Network("torch", label, make, floats((2, 6, 5)))


# The tables that follow are read by the row.
# fmt: off
TORCH = [
    recurrent("RNN", num_layers=2),
    recurrent("LSTM"),
    recurrent("LSTM", num_layers=2, bidirectional=True),
    recurrent("LSTM", proj_size=6),
    recurrent("GRU", num_layers=2),
    Network("torch", "TransformerEncoder, causal mask", lambda: Tutorial(False), tokens(), True),
    Network("torch", "TransformerEncoder, norm first", lambda: Tutorial(True), tokens(), True),
    network("torch.nn:Transformer", floats((2, 6, 24), (2, 5, 24)), 24, 4, 2, 2, 36,
            batch_first=True, transformer=True),
    network("torch.nn:TransformerDecoderLayer", floats((2, 6, 24), (2, 5, 24)), 24, 4, 36,
            batch_first=True, transformer=True),
]

# --- MONAI ------------------------------------------------------------------------------------


def monai(
    name: str, inputs: Maker, *args: Any, label: str = "", transformer: bool = False, **options: Any
) -> Network:
    path = f"monai.networks.nets:{name}"
    return network(path, inputs, *args, label=label, transformer=transformer, **options)


MONAI = [
    monai("UNet", images(), 2, 3, 4, channels=(6, 9, 14), strides=(2, 2), num_res_units=2),
    monai("UNet", volumes(16), 3, 1, 3, channels=(4, 6, 8), strides=(2, 2), norm="batch",
          label="UNet, 3D"),
    monai("BasicUNet", images(), 2, 3, 4, features=(6, 7, 9, 11, 13, 6)),
    monai("BasicUNetPlusPlus", images(), 2, 3, 4, features=(6, 7, 9, 11, 13, 6)),
    monai("AttentionUnet", images(), 2, 3, 4, channels=(6, 9, 14), strides=(2, 2)),
    monai("DynUNet", images(), 2, 3, 4, kernel_size=(3, 3, 3), strides=(1, 2, 2),
          upsample_kernel_size=(2, 2), filters=(6, 9, 14)),
    monai("DynUNet", images(), 2, 3, 4, kernel_size=(3, 3, 3, 3), strides=(1, 2, 2, 2),
          upsample_kernel_size=(2, 2, 2), filters=(6, 8, 10, 12), deep_supervision=True,
          deep_supr_num=1, res_block=True, label="DynUNet, deep supervision"),
    monai("SegResNet", images(), 2, 8, 3, 4, norm=("GROUP", {"num_groups": 4}),
          blocks_down=(1, 1), blocks_up=(1,)),
    monai("SegResNetDS", images(), 2, 8, 3, 4, blocks_down=(1, 1), dsdepth=2),
    monai("VNet", images(channels=2), 2, 2, 2),
    monai("HighResNet", volumes(12), 3, 1, 3, layer_params=(
        {"name": "conv_0", "n_features": 6, "kernel_size": 3},
        {"name": "res_1", "n_features": 6, "kernels": (3, 3), "repeat": 2},
        {"name": "conv_2", "n_features": 8, "kernel_size": 1},
        {"name": "conv_3", "kernel_size": 1},
    )),
    monai("DenseNet121", images(), 2, 3, 4, init_features=8, growth_rate=5, block_config=(2, 2, 1)),
    monai("SEResNet50", images(), spatial_dims=2, in_channels=3, num_classes=4, inplanes=16,
          layers=(1, 1, 1, 1)),
    monai("ResNet", images(), "basic", [1, 1, 1, 1], [6, 8, 10, 12], spatial_dims=2,
          n_input_channels=3, num_classes=4),
    monai("EfficientNetBN", images(), "efficientnet-b0", pretrained=False, spatial_dims=2,
          in_channels=3, num_classes=4),
    monai("Generator", floats((2, 8)), (8,), (6, 4, 4), (8, 6, 2), (2, 2, 1)),
    monai("AutoEncoder", images(), 2, 3, 3, (6, 9, 12), (2, 2, 2)),
    monai("VarAutoEncoder", images(16), 2, (3, 16, 16), 3, 5, (6, 9), (2, 2)),
    monai("AutoencoderKL", images(16), 2, 3, 3, num_res_blocks=(1, 1), channels=(8, 8),
          attention_levels=(False, False), latent_channels=2, norm_num_groups=4),
    monai("VQVAE", images(16), 2, 3, 3, channels=(8, 8), num_res_channels=(8, 8),
          num_embeddings=16, embedding_dim=6, downsample_parameters=((2, 4, 1, 1),) * 2,
          upsample_parameters=((2, 4, 1, 1, 0),) * 2),
    monai("RegUNet", images(), 2, 3, 6, 2),
    monai("ViT", images(), 3, 32, 8, hidden_size=24, mlp_dim=36, num_layers=2, num_heads=4,
          classification=True, num_classes=4, spatial_dims=2, transformer=True),
    monai("UNETR", images(), 3, 4, 32, feature_size=8, hidden_size=24, mlp_dim=36, num_heads=4,
          spatial_dims=2, transformer=True),
    monai("SwinUNETR", images(64), 3, 4, feature_size=12, depths=(1, 1, 1, 1),
          num_heads=(2, 2, 2, 2), spatial_dims=2, window_size=4, transformer=True),
    monai("FlexibleUNet", images(), 3, 4, "efficientnet-b0", decoder_channels=(16, 12, 10, 8, 6)),
    monai("DiffusionModelUNet",
          lambda: (drawn((2, 3, 16, 16)), torch.tensor([3, 5])), 2, 3, 3, num_res_blocks=(1, 1),
          channels=(8, 8), attention_levels=(False, True), norm_num_groups=4, num_head_channels=4),
    monai("ResNetFeatures", images(), "resnet10", pretrained=False, spatial_dims=2, in_channels=3),
]

# --- transformers -----------------------------------------------------------------------------

ENCODER = {
    "vocab_size": 41,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 36,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False}
VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 36,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 5,
}


def huggingface(
    name: str, inputs: Maker, base: dict[str, Any], *, transformer: bool = True, **options: Any
) -> Network:
    """A network of transformers, from a configuration of the class that it names."""

    def make() -> nn.Module:
        kind = load(f"transformers:{name}")
        return kind(kind.config_class(**{**base, **options}))

    return Network("transformers", name, make, inputs, transformer)


BLOCK = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 36, "decoder_ffn_dim": 36,
         "vocab_size": 41, "max_position_embeddings": 16, "use_cache": False, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAVE = {**ENCODER, "conv_dim": (8, 9), "conv_stride": (2, 2), "conv_kernel": (4, 3),
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "vocab_size": 11}

TRANSFORMERS = [
    huggingface("BertForSequenceClassification", tokens(), ENCODER),
    huggingface("RobertaForSequenceClassification", tokens(), ENCODER),
    huggingface("DistilBertForSequenceClassification", tokens(),
                {"vocab_size": 41, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 36,
                 "max_position_embeddings": 16}),
    huggingface("AlbertForSequenceClassification", tokens(), ENCODER, embedding_size=16),
    huggingface("ElectraForSequenceClassification", tokens(), ENCODER, embedding_size=16),
    huggingface("DebertaV2ForSequenceClassification", tokens(), ENCODER),
    huggingface("MobileBertForSequenceClassification", tokens(), ENCODER, embedding_size=16,
                intra_bottleneck_size=16, num_feedforward_networks=2),
    huggingface("MPNetForSequenceClassification", tokens(), ENCODER),
    huggingface("SqueezeBertForSequenceClassification", tokens(), ENCODER, embedding_size=24),
    huggingface("ConvBertForSequenceClassification", tokens(), ENCODER, embedding_size=24),
    huggingface("FNetForSequenceClassification", tokens(), ENCODER, tpu_short_seq_length=7),
    huggingface("ModernBertForSequenceClassification", tokens(), ENCODER),
    huggingface("FunnelForSequenceClassification", tokens(8),
                {"vocab_size": 41, "block_sizes": [1, 1], "d_model": 24, "n_head": 4, "d_head": 6,
                 "d_inner": 36}),
    huggingface("GPT2LMHeadModel", tokens(), {**ENCODER, "n_inner": 36, "use_cache": False}),
    huggingface("GPTNeoXForCausalLM", tokens(), ENCODER, use_cache=False),
    huggingface("OPTForCausalLM", tokens(), ENCODER, ffn_dim=36, word_embed_proj_dim=24,
                use_cache=False),
    huggingface("BloomForCausalLM", tokens(), ENCODER, n_layer=2, n_head=4, use_cache=False),
    huggingface("FalconForCausalLM", tokens(), ENCODER, use_cache=False),
    huggingface("LlamaForCausalLM", tokens(), DECODER),
    huggingface("MistralForCausalLM", tokens(), DECODER),
    huggingface("MixtralForCausalLM", tokens(), DECODER, num_local_experts=3),
    huggingface("Qwen2ForCausalLM", tokens(), DECODER),
    huggingface("Qwen3ForCausalLM", tokens(), DECODER, head_dim=6),
    huggingface("GemmaForCausalLM", tokens(), DECODER, head_dim=6),
    huggingface("PhiForCausalLM", tokens(), DECODER, hidden_size=32),
    huggingface("MambaForCausalLM", tokens(), {"vocab_size": 41, "hidden_size": 16, "state_size": 4,
                "num_hidden_layers": 2, "use_cache": False}, transformer=False),
    huggingface("T5ForConditionalGeneration", seq2seq(),
                {"vocab_size": 41, "d_model": 24, "d_kv": 6, "d_ff": 36, "num_layers": 2,
                 "num_heads": 4, "decoder_start_token_id": 0, "use_cache": False}),
    huggingface("BartForConditionalGeneration", seq2seq(), BLOCK),
    huggingface("MarianMTModel", seq2seq(), BLOCK),
    huggingface("PegasusForConditionalGeneration", seq2seq(), BLOCK),
    huggingface("WhisperForConditionalGeneration",
                lambda: (drawn((2, 8, 32)), None, ids(5, seed=1)), BLOCK, num_mel_bins=8,
                max_source_positions=16, max_target_positions=16),
    huggingface("Speech2TextForConditionalGeneration",
                lambda: (drawn((2, 32, 8)), None, ids(5, seed=1)), BLOCK,
                input_feat_per_channel=8, conv_channels=12, max_source_positions=32,
                max_target_positions=16),
    huggingface("Wav2Vec2ForCTC", floats((2, 160)), WAVE),
    huggingface("HubertForCTC", floats((2, 160)), WAVE),
    huggingface("ViTForImageClassification", images(), VISION),
    huggingface("DeiTForImageClassification", images(), VISION),
    huggingface("BeitForImageClassification", images(), VISION),
    huggingface("Dinov2ForImageClassification", images(), VISION),
    huggingface("YolosForObjectDetection", images(), VISION, image_size=[32, 32],
                num_detection_tokens=4),
    huggingface("ViTMAEModel", images(), VISION, mask_ratio=0.0),
    huggingface("SwinForImageClassification", images(),
                {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1, 2],
                 "num_heads": [2, 2], "window_size": 4, "num_labels": 5}),
    huggingface("SegformerForSemanticSegmentation", images(),
                {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1],
                 "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 14,
                 "num_labels": 5}),
    huggingface("MobileViTForImageClassification", images(),
                {"image_size": 32, "hidden_sizes": [12, 16, 20],
                 "neck_hidden_sizes": [6, 8, 10, 12, 14, 16, 20], "num_attention_heads": 2,
                 "num_labels": 5}),
    huggingface("ConvNextForImageClassification", images(),
                {"hidden_sizes": [8, 10, 12, 14], "depths": [1, 1, 1, 1], "num_labels": 5},
                transformer=False),
    huggingface("ResNetForImageClassification", images(),
                {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1],
                 "layer_type": "basic", "num_labels": 5}, transformer=False),
    huggingface("RegNetForImageClassification", images(),
                {"embedding_size": 8, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1],
                 "groups_width": 4, "num_labels": 5}, transformer=False),
    huggingface("CLIPVisionModel", images(), VISION),
    huggingface("CLIPTextModel", tokens(), ENCODER),
    huggingface("PerceiverForSequenceClassification", tokens(16),
                {"vocab_size": 41, "num_latents": 6, "d_latents": 16, "d_model": 16,
                 "num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
                 "num_cross_attention_heads": 2, "max_position_embeddings": 16}),
    huggingface("TimeSeriesTransformerModel", lambda: (
                drawn((2, 12)), drawn((2, 12, 1), 1), torch.ones(2, 12, dtype=torch.bool), None,
                None, drawn((2, 4), 2), drawn((2, 4, 1), 3)),
                {"prediction_length": 4, "context_length": 5, "lags_sequence": [1, 2, 7],
                 "num_time_features": 1, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
                 "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "use_cache": False,
                 "scaling": False}),
    huggingface("PatchTSTForPrediction", floats((2, 32, 3)),
                {"num_input_channels": 3, "context_length": 32, "patch_length": 8,
                 "patch_stride": 8, "d_model": 16, "num_attention_heads": 4, "ffn_dim": 20,
                 "num_hidden_layers": 2, "prediction_length": 4}),
]

# --- torchvision ------------------------------------------------------------------------------


def torchvision(name: str, size: int = 32, *, transformer: bool = False, **options: Any) -> Network:
    path = "torchvision.models" + (".segmentation" if "weights_backbone" in options else "")
    path = f"{path}:{name}"
    return network(path, images(size), num_classes=5, transformer=transformer, **options)


def small_resnet(block: str, **options: Any) -> Network:
    def make() -> nn.Module:
        kind = load(f"torchvision.models.resnet:{block}")
        return load("torchvision.models:ResNet")(kind, [1, 1, 1, 1], num_classes=5, **options)

    label = f"ResNet of {block}s" + "".join(f", {key}={value}" for key, value in options.items())
    return Network("torchvision", label, make, images())


def small_convnext() -> nn.Module:
    stage = load("torchvision.models.convnext:CNBlockConfig")
    return load("torchvision.models:ConvNeXt")([stage(8, 12, 1), stage(12, None, 1)], num_classes=5)


TORCHVISION = [
    small_resnet("BasicBlock"),
    small_resnet("Bottleneck"),
    small_resnet("Bottleneck", groups=4, width_per_group=4),
    torchvision("squeezenet1_1"),
    torchvision("densenet121"),
    torchvision("googlenet", 64, init_weights=False),
    torchvision("mobilenet_v2"),
    torchvision("mobilenet_v3_small"),
    torchvision("shufflenet_v2_x0_5"),
    torchvision("mnasnet0_5"),
    torchvision("efficientnet_b0"),
    torchvision("regnet_x_400mf"),
    Network("torchvision", "ConvNeXt", small_convnext, images()),
    network("torchvision.models:VisionTransformer", images(), 32, 8, 2, 4, 24, 36, num_classes=5,
            transformer=True),
    network("torchvision.models:SwinTransformer", images(), [4, 4], 12, [1, 1], [2, 2], [4, 4],
            num_classes=5, transformer=True),
    torchvision("lraspp_mobilenet_v3_large", 64, weights_backbone=None),
    torchvision("deeplabv3_mobilenet_v3_large", 64, weights_backbone=None),
]

# --- timm -------------------------------------------------------------------------------------


def timm(name: str, size: int = 32, *, transformer: bool = False, **options: Any) -> Network:
    return network("timm:create_model", images(size), name, num_classes=5, label=name,
                   transformer=transformer, **options)


TIMM = [
    timm("resnet10t", channels=(8, 10, 12, 14)),
    timm("resnetv2_18", layers=(1, 1, 1, 1), channels=(8, 16, 24, 32)),
    timm("seresnet18", channels=(16, 24, 32, 40)),
    timm("resnetblur18", channels=(8, 10, 12, 14)),
    timm("res2net50_14w_8s", layers=(1, 1, 1, 1), channels=(16, 24, 32, 40)),
    timm("resnest14d", channels=(16, 24, 32, 40)),
    timm("ghostnet_050"),
    timm("mobilenetv4_conv_small_035"),
    timm("mixnet_s"),
    timm("repvgg_a0"),
    timm("hardcorenas_a"),
    timm("regnety_002"),
    timm("dla46_c"),
    timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 10, 12, 14)),
    timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(8, 10, 12, 14)),
    timm("edgenext_xx_small", 64, depths=(1, 1, 1, 1)),
    network("timm.models.metaformer:MetaFormer", images(), num_classes=5, depths=(1, 1, 1, 1),
            dims=(8, 10, 12, 14)),
    timm("fastvit_t8", 64, layers=(1, 1, 1, 1), embed_dims=(8, 16, 32, 64)),
    network("timm.models.mlp_mixer:MlpMixer", images(), 5, 32, 3, 8, 2, 24),
    timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4,
         transformer=True),
    timm("deit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4,
         transformer=True),
    timm("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=32, depth=2, num_heads=4,
         transformer=True),
    timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=12, depths=(1, 2),
         num_heads=(2, 2), transformer=True),
    timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=4,
         transformer=True),
    timm("xcit_nano_12_p16_224", img_size=32, embed_dim=24, depth=2, num_heads=4,
         transformer=True),
    timm("levit_128s", 224, embed_dim=(16, 20, 24), key_dim=8, num_heads=(2, 2, 2),
         depth=(1, 1, 1), transformer=True),
    timm("coat_lite_tiny", img_size=32, embed_dims=(16, 16, 16, 16), serial_depths=(1, 1, 1, 1),
         num_heads=8, transformer=True),
    timm("pit_ti_224", 64, img_size=64, base_dims=(8, 8, 8), depth=(1, 1, 1), heads=(2, 2, 2),
         transformer=True),
]

# --- segmentation, nnU-Net, diffusion ---------------------------------------------------------


def segmentation(name: str, encoder: str, size: int = 64, **options: Any) -> Network:
    return network(
        f"segmentation_models_pytorch:{name}", images(size), encoder, encoder_weights=None,
        classes=4, label=f"{name}, {encoder}", **options)


SEGMENTATION = [
    segmentation("Unet", "resnet18", decoder_channels=(16, 14, 12, 10, 8)),
    segmentation("Unet", "mobilenet_v2", decoder_channels=(16, 14, 12, 10, 8)),
    segmentation("UnetPlusPlus", "mobilenet_v2", decoder_channels=(16, 14, 12, 10, 8)),
    segmentation("Linknet", "mobilenet_v2"),
    segmentation("FPN", "mobilenet_v2", decoder_pyramid_channels=16,
                 decoder_segmentation_channels=32),
    segmentation("PSPNet", "mobilenet_v2", psp_out_channels=16),
    segmentation("PAN", "mobilenet_v2", 128, decoder_channels=8),
    segmentation("DeepLabV3Plus", "mobilenet_v2", decoder_channels=16),
    segmentation("Segformer", "mit_b0", decoder_segmentation_channels=16),
]


def nnunet(name: str, **options: Any) -> Network:
    def make() -> nn.Module:
        kind = load(f"dynamic_network_architectures.architectures.unet:{name}")
        return kind(1, 3, (6, 8, 10), nn.Conv2d, 3, (1, 2, 2), num_classes=3,
                    n_conv_per_stage_decoder=1, norm_op=nn.InstanceNorm2d,
                    norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, **options)

    return Network("dynamic_network_architectures", name, make, images(channels=1))


NNUNET = [
    nnunet("PlainConvUNet", n_conv_per_stage=1, deep_supervision=True),
    nnunet("ResidualEncoderUNet", n_blocks_per_stage=1),
]

DIFFUSERS = [
    network("diffusers:UNet2DModel", lambda: (drawn((2, 3, 16, 16)), torch.tensor([3, 5])),
            sample_size=16, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4),
    network("diffusers:UNet2DConditionModel",
            lambda: (drawn((2, 4, 16, 16)), torch.tensor([3, 5]), drawn((2, 6, 12), 1)),
            sample_size=16, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            cross_attention_dim=12, attention_head_dim=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")),
    network("diffusers:AutoencoderKL", images(16), block_out_channels=(8, 8), norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    network("diffusers:VQModel", images(16), block_out_channels=(8,), norm_num_groups=4),
    network("diffusers:AutoencoderTiny", images(16), encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1)),
    network("diffusers:UNet1DModel", lambda: (drawn((2, 2, 32)), torch.tensor([3, 5])),
            block_out_channels=(32, 32), extra_in_channels=64,
            down_block_types=("DownBlock1DNoSkip", "DownBlock1D"),
            up_block_types=("UpBlock1D", "UpBlock1DNoSkip")),
    network("diffusers:PriorTransformer",
            lambda: (drawn((2, 16)), torch.tensor([3, 5]), drawn((2, 16), 1), drawn((2, 7, 16), 2)),
            num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=16,
            num_embeddings=7, additional_embeddings=4, transformer=True),
]

# --- graphs, and transformers of other authors ------------------------------------------------


def graph() -> Inputs:
    """Node features, and edges both ways along a ring."""
    nodes = torch.arange(8)
    ring = torch.stack([nodes, nodes.roll(1)])
    return drawn((8, 5)), torch.cat([ring, ring.flip(0)], dim=1)


def geometric(name: str, *args: Any, **options: Any) -> Network:
    return network(f"torch_geometric.nn.models:{name}", graph, 5, *args, **options)


GEOMETRIC = [
    geometric("GCN", 9, 2, 4),
    geometric("GraphSAGE", 9, 2, 4),
    geometric("GIN", 9, 2, 4),
    geometric("GAT", 12, 2, 4, heads=3),
    geometric("EdgeCNN", 9, 2, 4),
    geometric("PNA", 9, 2, 4, aggregators=["mean", "max"], scalers=["identity", "amplification"],
              deg=torch.tensor([0, 0, 8])),
    network("torch_geometric.nn.models:MLP", floats((8, 5)), [5, 9, 7, 4]),
]


def lucidrains(name: str, module: str = "", size: int = 32, **options: Any) -> Network:
    path = f"vit_pytorch{'.' + module if module else ''}:{name}"
    return network(path, images(size), transformer=True, **options)


PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 24, "depth": 2, "heads": 3,
         "mlp_dim": 36}

VIT_PYTORCH = [
    lucidrains("ViT", **PLAIN, dim_head=8),
    lucidrains("SimpleViT", **PLAIN, dim_head=8),
    lucidrains("DeepViT", module="deepvit", **PLAIN, dim_head=8),
    lucidrains("CaiT", module="cait", **PLAIN, cls_depth=1, dim_head=8),
    lucidrains("CCT", module="cct", img_size=32, embedding_dim=24, n_conv_layers=1, num_layers=2,
               num_heads=4, mlp_ratio=1.5, num_classes=5, positional_embedding="learnable"),
    lucidrains("CvT", module="cvt", num_classes=5, s1_emb_dim=8, s2_emb_dim=12, s3_emb_dim=16,
               s1_heads=1, s2_heads=2, s3_heads=2, s3_depth=1),
    lucidrains("ViT", module="vit_for_small_dataset", label="ViT, small data set", **PLAIN,
               dim_head=8),
    lucidrains("PiT", module="pit", image_size=32, patch_size=8, num_classes=5, dim=24,
               depth=(1, 1), heads=2, mlp_dim=36, dim_head=8),
    lucidrains("MobileViT", module="mobile_vit", size=128, image_size=(128, 128), dims=[12, 16, 20],
               channels=[6, 6, 8, 8, 10, 10, 12, 12, 14, 14, 16], num_classes=5),
]


AROUND = {
    "TransformerWrapper": {"num_tokens": 41, "max_seq_len": 16},
    "ViTransformerWrapper": {"image_size": 32, "patch_size": 8, "num_classes": 5},
    "ContinuousTransformerWrapper": {"dim_in": 5, "dim_out": 4, "max_seq_len": 16},
}


def attention_layers(wrapper: str, kind: str, inputs: Maker, **options: Any) -> Network:
    """A network of x_transformers around its `Encoder` or `Decoder`."""

    def make() -> nn.Module:
        layers = load(f"x_transformers:{kind}")
        body = layers(dim=24, depth=2, heads=3, attn_dim_head=8, **options)
        return load(f"x_transformers:{wrapper}")(**AROUND[wrapper], attn_layers=body)

    return Network("x_transformers", ", ".join([wrapper, kind, *options]), make, inputs, True)


X_TRANSFORMERS = [
    attention_layers("TransformerWrapper", "Encoder", tokens()),
    attention_layers("TransformerWrapper", "Decoder", tokens(), rotary_pos_emb=True),
    attention_layers("TransformerWrapper", "Decoder", tokens(), alibi_pos_bias=True, ff_glu=True),
    attention_layers("TransformerWrapper", "Encoder", tokens(), use_rmsnorm=True,
                     attn_qk_norm=True),
    attention_layers("ViTransformerWrapper", "Encoder", images()),
    attention_layers("ContinuousTransformerWrapper", "Encoder", floats((2, 6, 5))),
]

OTHERS = [
    Network("efficientnet_pytorch", "efficientnet-b0", lambda: load(
        "efficientnet_pytorch:EfficientNet").from_name("efficientnet-b0", num_classes=5), images()),
    Network("opacus", "DPLSTM", lambda: Sequence(load("opacus.layers:DPLSTM")(
        5, 9, batch_first=True), 9), floats((2, 6, 5))),
    Network("opacus", "DPGRU", lambda: Sequence(load("opacus.layers:DPGRU")(
        5, 9, batch_first=True), 9), floats((2, 6, 5))),
]

NETWORKS: list[Network] = [
    *TORCH,
    *MONAI,
    *TRANSFORMERS,
    *TORCHVISION,
    *TIMM,
    *SEGMENTATION,
    *NNUNET,
    *DIFFUSERS,
    *GEOMETRIC,
    *VIT_PYTORCH,
    *X_TRANSFORMERS,
    *OTHERS,
]
BY_LABEL = {network.label: network for network in NETWORKS}
