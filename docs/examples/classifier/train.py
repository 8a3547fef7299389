"""A plain classifier in a loop of one's own: update hooks and their orchestrator, without a strategy."""

import torch
from torch import nn

from nvalchemi.hooks import TrainContext
from nvalchemi.training import EMAHook, GradientClipHook, GradScalerVetoHook, TrainingStage
from nvalchemi.training.hooks import TrainingUpdateOrchestrator

torch.set_num_threads(1)  # the tensors are tiny: more threads would wait for each other
torch.manual_seed(0)
labels = torch.arange(1000) % 2  # two spirals, one of them turned by half a turn
radius = torch.rand(1000)
angle = 7 * radius + torch.pi * labels
points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + 0.01 * torch.randn(1000, 2)

model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
clip, ema = GradientClipHook(max_norm=0.5), EMAHook(decay=0.98)
batches, steps = 600, 0
with TrainingUpdateOrchestrator(GradScalerVetoHook(), clip, ema) as update:
    for batch in range(batches):
        some = torch.randint(len(points), (64,))
        x = points[some] if batch != 100 else points[some] * torch.inf  # one broken batch: its step is vetoed
        with TrainContext(model=model, optimizers=[optimizer], step_count=steps) as ctx:
            update(ctx, TrainingStage.BEFORE_BATCH)
            ctx.loss = nn.functional.cross_entropy(model(x), labels[some])
            update(ctx, TrainingStage.DO_BACKWARD)
            update(ctx, TrainingStage.DO_OPTIMIZER_STEP)
            update(ctx, TrainingStage.AFTER_OPTIMIZER_STEP)
        steps += not ctx.step_skipped

print(f"{steps} steps, {batches - steps} vetoed, {clip.clipped_steps} clipped")
for weights, network in (("live", model), ("averaged", ema.get_averaged_model())):
    print(f"{weights}: {(network(points).argmax(1) == labels).float().mean():.1%} of the points are on their spiral")
