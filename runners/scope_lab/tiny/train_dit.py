"""Train the embedded model's DiT: a resumable, seeded run whose last state is always on disk.

Method: flow matching with shift 5 (Lipman et al., 2023; Esser et al., 2024) under teacher forcing
(`teacher_forcing.py`). Most noise levels are the four that inference uses, the rest follow the
shifted schedule. Every batch is used twice: first with the true past as context, then with the
model's own predictions of that past (and light noise on both), so that a stream survives its own
mistakes. First chunks of an epoch and clips of two objects count more, being the hard ones.
Matrices inside blocks are trained with Muon (Jordan et al., 2024), the rest with AdamW.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_lab.tiny.muon import Muon
from scope_lab.tiny.teacher_forcing import TeacherForcing
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.loading import save_transformer
from scope_rt.models.rope import rotations
from scope_rt.models.schedule import FlowSchedule

CONFIG = CausalWanConfig(
    num_attention_heads=4,
    attention_head_dim=48,
    in_channels=16,
    out_channels=16,
    text_dim=64,
    freq_dim=128,
    ffn_dim=512,
    num_layers=6,
)
NUM_CHUNKS, FRAMES_PER_BLOCK, WINDOW_CHUNKS = 4, 3, 3
STEP_LIST = (1000.0, 937.5, 2500 / 3, 625.0)
CHUNK_WEIGHTS = (1.6, 0.8, 0.8, 0.8)
"""Of each chunk's loss: the first of an epoch has nothing but the text to go by."""
OWN_CONTEXT_MAX_SIGMA = 0.9
BATCHES_PER_SCAN = 250


@dataclass(frozen=True, slots=True)
class Batch:
    """`latents [B, F, C, h, w]` of whole clips and the text of each chunk `[B, chunks, L, E]`."""

    latents: Tensor
    text: Tensor


def batches(folder: Path, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Endless random batches from the clip shards in `folder`; new shards join as they appear."""
    shards: dict[Path, dict[str, Tensor]] = {}
    while True:
        for path in sorted(folder.glob("*.safetensors")):
            if path not in shards:
                shards[path] = load_file(path)
        latents = torch.cat([shard["latents"] for shard in shards.values()])
        text = torch.cat([shard["text"] for shard in shards.values()])
        if len(latents) < size:
            raise UserInputError(f"{folder} holds {len(latents)} clips, a batch needs {size}")
        weights = 1.0 + shows_two_objects(text).double()
        for _ in range(min(BATCHES_PER_SCAN, len(latents) // size)):
            rows = torch.multinomial(weights, size, generator=generator)
            yield Batch(latents[rows].float(), text[rows].float())


def shows_two_objects(text_NKLE: Tensor) -> Tensor:
    """Which clips ever name a second object; such clips are drawn twice as often, being harder.

    A named object is the sum of two unit-RMS words, "none" is one word.
    """
    return (text_NKLE[:, :, 1].float().square().mean(-1) > 1.5).any(-1)


class Trainer:
    """Owns the model, its average, both optimisers and the step number."""

    def __init__(self, *, folder: Path, num_steps: int, seed: int, compiled: bool) -> None:
        torch.manual_seed(seed)
        self.folder, self.num_steps, self.step = folder, num_steps, 0
        self.generator = torch.Generator().manual_seed(seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = CausalWanModel(CONFIG).to(self.device)
        nn.init.zeros_(self.model.proj_out.weight)
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=2e-3, momentum=0.95, weight_decay=0.05),
            torch.optim.AdamW(rest, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.base_lr = [group["lr"] for o in self.optimizers for group in o.param_groups]
        frames = list(range(NUM_CHUNKS * FRAMES_PER_BLOCK))
        self.rope = rotations(
            frames[:-FRAMES_PER_BLOCK] + frames,
            grid=(4, 4),
            head_dim=CONFIG.attention_head_dim,
            dtype=torch.complex64,
        ).to(self.device)
        self.attend = TeacherForcing(NUM_CHUNKS, FRAMES_PER_BLOCK * 16, WINDOW_CHUNKS)
        self.chunk_weights = torch.tensor(CHUNK_WEIGHTS, device=self.device)
        self.flow = torch.compile(self._flow) if compiled else self._flow
        self.load()

    def _flow(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        return self.model(  # type: ignore[no-any-return]
            latents,
            modulation=self.model.modulation(timesteps),
            rope=self.rope,
            text=self.model.text_kv(text),
            attend=self.attend,
        )

    def draw_sigmas(self, batch: int) -> Tensor:
        """Noise level of every chunk, `[B, chunks]`: 80% from the inference steps."""
        steps = torch.tensor(STEP_LIST) / 1000
        picked = steps[torch.randint(len(steps), (batch, NUM_CHUNKS), generator=self.generator)]
        u = torch.rand(batch, NUM_CHUNKS, generator=self.generator)
        anywhere = FlowSchedule.shifted(u.clamp_min(0.02), shift=5.0)
        use = torch.rand(batch, NUM_CHUNKS, generator=self.generator) < 0.8
        return torch.where(use, picked, anywhere).to(self.device)

    def loss(self, batch: Batch, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Flow-matching loss; also the predicted x0 and its noise level, for own-context use."""
        x0, text = batch.latents, batch.text
        sigmas = self.draw_sigmas(len(x0))
        sigma = sigmas.repeat_interleave(FRAMES_PER_BLOCK, 1)[..., None, None, None]
        noise = torch.randn(x0.shape, generator=self.generator).to(self.device)
        strength = 0.1 * torch.rand(len(x0), 1, 1, 1, 1, generator=self.generator)
        jitter = (strength * torch.randn(x0.shape, generator=self.generator)).to(self.device)
        noisy = (1 - sigma) * x0 + sigma * noise
        timesteps = torch.cat([torch.zeros_like(sigmas[:, 1:]), 1000 * sigmas], 1)
        flow = self.flow(
            torch.cat([(context + jitter)[:, :-FRAMES_PER_BLOCK], noisy], 1),
            timesteps.repeat_interleave(FRAMES_PER_BLOCK, 1),
            torch.cat([text[:, :-1], text], 1),
        )[:, -x0.shape[1] :]
        predicted = (noisy - sigma * flow).detach()
        error = (flow - (noise - x0)).pow(2).unflatten(1, (NUM_CHUNKS, -1)).flatten(2).mean(2)
        return (error * self.chunk_weights).mean(), predicted, sigma

    def train_step(self, batch: Batch, context: Tensor) -> tuple[float, Tensor]:
        """One optimiser step; returns the loss and a context made of the model's own frames."""
        loss, predicted, sigma = self.loss(batch, context)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = min(1.0, (self.step + 1) / 100) * min(
            1.0, (self.num_steps - self.step) / (0.4 * self.num_steps)
        )
        groups = [group for o in self.optimizers for group in o.param_groups]
        for group, lr in zip(groups, self.base_lr, strict=True):
            group["lr"] = lr * scale
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        decay = min(0.998, self.step / (self.step + 20))
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.average[name].lerp_(p, 1 - decay)
        own = torch.where(sigma <= OWN_CONTEXT_MAX_SIGMA, predicted, batch.latents)
        return loss.item(), own

    def run(self, clips: Path, batch_size: int, save_every_s: float = 120.0) -> None:
        saved, started, losses = time.monotonic(), time.monotonic(), []
        for cpu_batch in batches(clips, batch_size, self.generator):
            batch = Batch(cpu_batch.latents.to(self.device), cpu_batch.text.to(self.device))
            context = batch.latents
            for _ in range(2):
                loss, context = self.train_step(batch, context)
                losses.append(loss)
            if self.step % 50 == 0:
                mean, losses = sum(losses) / len(losses), []
                elapsed = time.monotonic() - started
                print(f"step {self.step} loss {mean:.4f} {elapsed:.0f} s", flush=True)
            done = self.step >= self.num_steps
            if done or time.monotonic() - saved > save_every_s:
                self.save()
                saved = time.monotonic()
            if done:
                return

    def save(self) -> None:
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "generator": self.generator.get_state(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.folder / "state.tmp")
        (self.folder / "state.tmp").replace(self.folder / "state.pt")
        save_transformer(CONFIG, self.average, self.folder / "transformer")

    def load(self) -> None:
        path = self.folder / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"].cpu())
        print(f"resumed at step {self.step}", flush=True)
