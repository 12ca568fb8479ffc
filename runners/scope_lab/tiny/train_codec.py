"""Train the embedded codec: the encoder is solved once, the decoder learned on endless fresh clips.

The encoder is the principal components of the world's patches, partly whitened, and never changes
afterwards, so a latent model can train on its latents while the decoder still learns. The decoder
learns from disturbed latents, because generated ones are never exact. Any state on disk resumes.
"""

import math
import time
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from scope_lab.tiny.world import CHUNK_FRAMES, sample_clips
from scope_rt.vae.tiny import FRAMES, STRIDE, TinyCodecConfig, TinyVideoCodec

CLIP_FRAMES = 2 * CHUNK_FRAMES
CHANGE_PROBABILITY = 0.25
MAX_NOISE = 0.25
L1_WEIGHT = 0.05
EDGE_WEIGHT = 3.0
EDGE_MIN_STD = 0.01
FIT_CLIPS = 6000
LEARNING_RATE, WARMUP_STEPS, EMA_DECAY = 6e-4, 100, 0.998
HELD_OUT_SEED, HELD_OUT_CLIPS = 2**31, 24


@torch.no_grad()
def fit_encoder(codec: TinyVideoCodec, generator: torch.Generator, num_clips: int) -> float:
    """Solve the encoder, and the decoder's linear guess, from patches of `num_clips` clips.

    Patches with an edge count `EDGE_WEIGHT` times. Each latent channel keeps the square root of its
    component's standard deviation, and all channels together have unit variance.

    Returns:
        The share of the (weighted) patch variance that the latents keep.
    """
    size = 3 * FRAMES * STRIDE**2
    second = torch.zeros(size, size, dtype=torch.float64)
    first, total = torch.zeros(size, dtype=torch.float64), 0.0
    batch = 50
    for _ in range(num_clips // batch):
        video = sample_clips(batch, CLIP_FRAMES, generator, CHANGE_PROBABILITY).video_BTCHW
        inside = video[:, CHUNK_FRAMES - FRAMES : CHUNK_FRAMES + FRAMES]
        patches = rearrange(
            inside, "b (f t) c (h p) (w q) -> (b f h w) (t c p q)", t=FRAMES, p=STRIDE, q=STRIDE
        )
        has_edge = patches.view(len(patches), 3 * FRAMES, -1).std(-1).amax(1) > EDGE_MIN_STD
        weight = torch.where(has_edge, EDGE_WEIGHT, 1.0)
        weighted = patches * weight.sqrt()[:, None]
        second += (weighted.T @ weighted).double()
        first += (patches * weight[:, None]).sum(0)
        total += float(weight.sum())
    mean = first / total
    variances, vectors = torch.linalg.eigh(second / total - mean.outer(mean))
    components = vectors.flip(1)[:, : codec.latent_channels].T
    kept = variances.flip(0)[: codec.latent_channels]
    scale = kept.pow(-0.25) / kept.sqrt().mean().sqrt()
    _set_projection(codec, scale[:, None] * components, components / scale[:, None], mean)
    # Edges weigh more above than in a real clip: bring the latents of real clips to unit variance.
    clips = sample_clips(256, CLIP_FRAMES, generator, CHANGE_PROBABILITY)
    latents = codec.encode(clips.video_BTCHW)
    real = float(latents.var(dim=(0, 1, 3, 4)).mean().sqrt())
    centre = latents.mean(dim=(0, 1, 3, 4)).double()
    mean = mean + (centre / scale) @ components
    scale = scale / real
    _set_projection(codec, scale[:, None] * components, components / scale[:, None], mean)
    return float(kept.sum() / variances.sum())


def _set_projection(codec: TinyVideoCodec, down: Tensor, up: Tensor, mean: Tensor) -> None:
    """Install `latents = down (patch - mean)` and the guess `patch = up^T latents + mean`.

    A transposed convolution has one bias per channel, not per pixel, so the guess rounds the mean.
    """
    codec.encoder.weight.copy_(down.reshape(codec.encoder.weight.shape))
    guess = codec.decoder.guess
    guess.weight.copy_(up.reshape(guess.weight.shape))
    assert codec.encoder.bias is not None
    assert guess.bias is not None
    codec.encoder.bias.copy_(-(down @ mean))
    guess.bias.copy_(mean.view(3 * FRAMES, -1).mean(1))
    for weights in (codec.encoder.weight, codec.encoder.bias):
        weights.copy_(weights.half())  # what is saved is what every latent is made with


class Trainer:
    """Owns the codec, its average, the optimiser and the step number."""

    def __init__(self, *, out: Path, num_steps: int, seed: int, resume: bool) -> None:
        torch.manual_seed(seed)
        self.out, self.num_steps, self.step = out, num_steps, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.codec = TinyVideoCodec(TinyCodecConfig())
        state_path = out / "state.pt"
        resuming = resume and state_path.exists()
        if not resuming:
            kept = fit_encoder(self.codec, self.generator, FIT_CLIPS)
            print(f"encoder: {100 * kept:.1f}% of the patch variance kept", flush=True)
        self.average = TinyVideoCodec(self.codec.config)
        self.average.load_state_dict(self.codec.state_dict())
        self.optimizer = torch.optim.AdamW(
            self.codec.decoder.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
        )
        if resuming:
            self._load(state_path)
        else:
            self.save()
        held_out = torch.Generator().manual_seed(HELD_OUT_SEED)
        self.held_out = sample_clips(
            HELD_OUT_CLIPS, 4 * CHUNK_FRAMES, held_out, CHANGE_PROBABILITY
        ).video_BTCHW

    def loss(self, video_BTCHW: Tensor) -> Tensor:
        """Pixel loss of all latent frames of some clips, latents disturbed by up to `MAX_NOISE`."""
        latents = self.codec.encode(video_BTCHW)
        strength = MAX_NOISE * torch.rand(len(latents), 1, 1, 1, 1, generator=self.generator)
        clean = torch.rand(strength.shape, generator=self.generator) < 0.25
        noise = torch.randn(latents.shape, generator=self.generator)
        latents = latents + noise * strength.masked_fill(clean, 0)
        previous = torch.cat([torch.zeros_like(latents[:, :1]), latents[:, :-1]], 1)
        packed = self.codec.decoder(latents.flatten(0, 1), previous.flatten(0, 1))
        wanted = rearrange(video_BTCHW, "b (f t) c h w -> (b f) (t c) h w", t=FRAMES)
        error = packed - wanted
        loss: Tensor = error.square().mean() + L1_WEIGHT * error.abs().mean()
        return loss

    def train_step(self, batch: int) -> float:
        """One optimiser step on fresh clips; returns the loss."""
        clips = sample_clips(batch, CLIP_FRAMES, self.generator, CHANGE_PROBABILITY)
        loss = self.loss(clips.video_BTCHW)
        loss.backward()
        nn.utils.clip_grad_norm_(self.codec.decoder.parameters(), 1.0)
        progress = self.step / self.num_steps
        warmup = min(1.0, (self.step + 1) / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = (
                LEARNING_RATE * warmup * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        decay = min(EMA_DECAY, self.step / (self.step + 10))
        pairs = zip(self.average.parameters(), self.codec.parameters(), strict=True)
        with torch.no_grad():
            for averaged, current in pairs:
                averaged.lerp_(current, 1 - decay)
        return loss.item()

    @torch.inference_mode()
    def held_out_psnr(self) -> float:
        """PSNR in dB of the averaged codec on video that is never trained on."""
        video = self.average.decode(self.average.encode(self.held_out))
        return -10 * math.log10(float((video - self.held_out).square().mean()) / 4)

    def run(self, batch: int, save_every_s: float = 60.0) -> None:
        """Train to the last step; the state and the averaged weights are saved on the way."""
        started = saved = time.monotonic()
        while self.step < self.num_steps:
            loss = self.train_step(batch)
            if time.monotonic() - saved > save_every_s or self.step == self.num_steps:
                saved = time.monotonic()
                self.save()
                elapsed, psnr = saved - started, self.held_out_psnr()
                print(
                    f"step {self.step} loss {loss:.5f} psnr {psnr:.2f} dB {elapsed:.0f} s",
                    flush=True,
                )

    def save(self) -> None:
        state = {
            "step": self.step,
            "codec": self.codec.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }
        self.out.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.pt")
        self.average.save_pretrained(self.out / "codec")

    def _load(self, path: Path) -> None:
        state = torch.load(path)
        self.step = state["step"]
        self.codec.load_state_dict(state["codec"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        print(f"resumed at step {self.step}", flush=True)
