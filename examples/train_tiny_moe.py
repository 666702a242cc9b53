"""Trains a tiny language model with a MoE layer, on all ranks and again on one: the same losses.

    python -m mpi_launch -n 2 examples/train_tiny_moe.py [STEPS]

The text is the language reference that Python's help() shows. The model is in examples/moe/. Prints the loss
of both runs; with matplotlib it draws them into train_tiny_moe.png. Exits with 1 if they differ by more than
`tolerance` allows.
"""

import importlib.util
import sys
from pydoc_data.topics import topics

import numpy as np
from moe.language_model import CONTEXT, LanguageModel

import epcomm

STEPS, BATCH, RATE = 300, 256, 1.0


def tolerance(losses):
    """How far the losses of two runs in float32 may be apart that add the same numbers in another order.

    The layer's gradients are right to a relative 1e-5 (moe_layer.py). If every step's is off by that much,
    the parameters are off by 1e-5 * sum(RATE * |gradient|), and the loss, to first order, by no more than
    1e-5 * sum(RATE * |gradient|^2), which is 1e-5 times what gradient descent takes off the loss. Ten times
    that leaves room for curvature, and for tokens whose second and third expert swap places by a rounding.
    """
    return 10 * 1e-5 * (losses[0] - min(losses))


def train(group, text, vocabulary, steps):
    """The loss of each step. The batches do not depend on the number of ranks, which share them out."""
    losses = []
    model = LanguageModel(group, vocabulary, num_tokens=-(-BATCH // group.size))
    for step in range(steps):
        starts = np.random.default_rng([1, step]).integers(len(text) - CONTEXT, size=BATCH)
        mine = np.array_split(starts, group.size)[group.rank]
        window = text[mine[:, None] + np.arange(CONTEXT + 1)]
        losses.append(model.step(window[:, :-1], window[:, -1], BATCH, RATE))
    model.buffer.check()
    model.close()
    return losses


def draw(curves):
    """The losses as train_tiny_moe.png, where matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for style, (label, losses) in zip(("-", "--"), curves.items(), strict=True):
        axes.plot(losses, style, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats a character")
    axes.legend()
    figure.savefig("train_tiny_moe.png", dpi=120)


def main(steps=STEPS):
    letters, text = np.unique(np.array(list("".join(topics.values()).lower())), return_inverse=True)
    with epcomm.Group() as group, epcomm.Group(group.comm.Split(group.rank)) as alone:
        balanced = train(group, text, len(letters), steps)
        single = train(alone, text, len(letters), steps) if group.rank == 0 else None
        group.barrier(timeout=3600)  # the others sleep meanwhile, which MPI's own calls do not
        single = group.comm.bcast(single, root=0)
    apart, allowed = max(abs(a - b) for a, b in zip(balanced, single, strict=True)), tolerance(single)
    if group.rank == 0:
        for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
            print(
                f"step {step:4}: loss {balanced[step]:.4f} on {group.size} ranks, {single[step]:.4f} on one"
            )
        draw({f"{group.size} ranks, balanced": balanced, "one rank": single})
        verdict = "OK" if apart <= allowed else "wrong"
        print(f"{verdict}: losses differ by at most {apart:.1e}, allowed {allowed:.1e}", flush=True)
    return 0 if apart <= allowed else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
