"""A clip band below the mismatch pulls a policy towards its rollout engine, and the run collapses.

    python examples/clip_pull.py --out figures

Toy flows are trained with FlowGRPO's loss on samples of an engine that holds their weights in 8 or
6 bits, S runs side by side; T steps, N samples of a run, D elements. Half a minute on one core.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch

S, T, N, D, STD = 4, 4, 256, 32, 0.3
TIMES = torch.arange(T).div(T).view(T, 1, 1)
SEEDED = torch.Generator().manual_seed(0)
POINTS = torch.randn(S, 1, 2, D, generator=SEEDED)  # a flow goes from noise to one of two points
ENGINES = {bits: (POINTS * 2 ** (bits - 3)).round() / 2 ** (bits - 3) for bits in (8, 6)}
FROZEN = torch.randn(S, 1, D, 16, generator=SEEDED) / D**0.5  # the adapter's frozen half
WIDTHS = (0.03, 0.1, 0.3, 0.6, 1, 1.5, 2, 3, 4, 10, 30)
TITLES = ("random advantages: length of the gradient / truth", "real ones: cosine with the truth")
ARMS = {  # exact rollout; width of the band in standard deviations; centered; recomputed; style
    "exact rollout, tight band": (True, 0.1, False, False, "#7d8590", "-"),
    "tight band": (False, 0.1, False, False, "#d55e00", "-"),
    "wide band": (False, 4, False, False, "#e69f00", "-"),
    "wide band, centered ratio": (False, 4, True, False, "#0072b2", "--"),
    "tight band, recomputed anchor": (False, 0.1, False, True, "#009e73", "-."),
    "wide band, recomputed anchor": (False, 4, False, True, "#cc79a7", ":"),
}


def step_means(points, adapter, x, t):
    """Computes the means of the Gaussian steps from the states x [S, T, N, D] at times t."""
    scores = x @ points.mT - t * points.square().sum(-1).unsqueeze(-2) / 2
    goal = (t * scores / (D * (1 - t) ** 2)).softmax(-1) @ points + (x @ FROZEN).tanh() @ adapter
    return x + (goal - x) / (T * (1 - t))


def sample(points, adapter, noise):
    """Returns states before the steps, the steps' means, rewards [S, N], advantages [S, 1, N]."""
    x, states, means = noise[:, -1:], [], []
    for k in range(T):
        states.append(x)
        means.append(step_means(points, adapter, x, TIMES[k]))
        x = means[k] + STD * noise[:, k : k + 1]
    reward = (POINTS[:, 0, :1] - x[:, 0]).square().mean(-1).neg().exp()  # near the first point?
    advantages = (reward - reward.mean(1, keepdim=True)) / reward.std(1, keepdim=True)
    return torch.cat(states, 1), torch.cat(means, 1), reward, advantages.detach().unsqueeze(1)


def log_ratio(adapter, rollout, noise, centered=False, n=slice(None)):
    """Computes log p - log p_rollout, [S, T, N], of samples n of a rollout drawn with `noise`."""
    states, means, e = rollout[0][:, :, n], rollout[1][:, :, n], noise[:, :T, n]
    d = (step_means(POINTS, adapter, states, TIMES) - means) / STD
    return (e * d if centered else e * d - d.square() / 2).mean(-1)


def surrogate(log_r, advantages, band):
    """Computes PPO's clipped objective; its scale is that of log-probs summed over D and T."""
    ratio, clipped = log_r.exp(), log_r.exp().clamp(1 - band, 1 + band)
    return D * T * torch.minimum(advantages * ratio, advantages * clipped).mean((1, 2)).sum()


def compare(bits):
    """Returns rows of the first table by (bits, centered): gradients before training, by width."""
    torch.manual_seed(1)
    noise, adapter = torch.randn(S, T + 1, 4096, D), torch.zeros(S, 1, 16, D, requires_grad=True)

    def gradient(value):
        return torch.autograd.grad(value, adapter, retain_graph=True)[0].flatten(1)

    reward, like = sample(POINTS, adapter, noise)[2], torch.cosine_similarity
    truth = gradient((reward.mean(1) / reward.std(1).detach()).sum())  # through the sampler itself
    with torch.no_grad():
        exact, rollout = (sample(points, adapter, noise) for points in (POINTS, ENGINES[bits]))
    batch_noise = gradient(surrogate(log_ratio(adapter, exact, noise), exact[3], 1)) - truth
    ratios, rows = [log_ratio(adapter, rollout, noise, c) for c in (False, True)], {}
    pull = gradient((ratios[0] - ratios[1]).mean())  # plain less centered is minus the KL
    for centered, width in ((c, w) for c in (False, True) for w in WIDTHS):
        log_r, size = ratios[centered], rollout[3].abs()
        band = width * log_r.detach().std(-1, keepdim=True)
        chance = gradient(surrogate(log_r, size, band) + surrogate(log_r, -size, band)) / 2
        real = gradient(surrogate(log_r, rollout[3], band)) - batch_noise
        values = (chance.norm(dim=1) / truth.norm(dim=1), like(chance, pull), like(real, truth))
        rows.setdefault((bits, centered), []).append([value.mean().item() for value in values])
    return rows


def train(bits, arm, iterations):
    """Returns rewards [iterations, S], log-ratios before the last iteration's updates, the band."""
    exact, width, centered, recomputed, *_ = ARMS[arm]
    torch.manual_seed(2)
    noise, adapter = torch.randn(S, T + 1, N, D), torch.zeros(S, 1, 16, D, requires_grad=True)
    optimizer, rewards = torch.optim.Adam([adapter], 1e-2), []
    mismatch = log_ratio(adapter, sample(ENGINES[bits], adapter, noise), noise).detach()
    band = width * mismatch.std(-1, keepdim=True)
    for _ in range(iterations):
        noise = torch.randn(S, T + 1, N, D)
        with torch.no_grad():
            rewards.append(sample(POINTS, adapter, noise)[2].mean(1))
            rollout = sample(POINTS if exact else ENGINES[bits], adapter, noise)
            before = log_ratio(adapter, rollout, noise)
            anchor = recomputed * log_ratio(adapter, rollout, noise, centered)
        for n in torch.arange(N).chunk(4):
            log_r = log_ratio(adapter, rollout, noise, centered, n) - anchor[:, :, n]
            optimizer.zero_grad()
            surrogate(log_r, rollout[3][:, :, n], band).neg().backward()
            optimizer.step()
    return torch.stack(rewards), before, band


def main(argv=None):
    """Prints both tables and draws both figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--iterations", type=int, default=120)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "collapse", "axes.titlesize": 10}
    print(
        "engine, ratio, band | random: length, cosine with the pull | real: cosine with the truth"
    )
    _, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for (bits, centered), rows in {k: v for b in ENGINES for k, v in compare(b).items()}.items():
        name = f"{bits} bits, {'centered' if centered else 'plain'} ratio"
        style, colour = "o-" if bits == 8 else "^--", "#0072b2" if centered else "#d55e00"
        for width, (length, pull, truth) in zip(WIDTHS, rows, strict=True):
            print(f"{name:22} {width:5} | {length:.3f} {pull:5.2f} | {truth:.2f}")
        for axis, column, title in zip(axes, (0, 2), TITLES, strict=True):
            axis.semilogx(WIDTHS, [r[column] for r in rows], style, color=colour, ms=4, label=name)
            axis.set(title=title, xlabel="half-width of the clip band / std of the mismatch")
    axes[0].legend()
    plt.savefig(args.out / "collapse_pull.svg", metadata={"Date": None})
    print("engine, arm | reward: start, best, end | mismatch at the end: std, KL | end of each run")
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    for bits, arm in ((b, a) for b in ENGINES for a in ARMS):
        rewards, last, _ = train(bits, arm, args.iterations)
        mean, end = rewards.mean(1), rewards[-5:].mean(0)
        row = f"{mean[0]:.2f} {mean.max():.2f} {end.mean():.2f} | {last.std():.4f}"
        print(f"{bits} {arm:29} | {row} {-last.mean():.1e} |", *(f"{x:.2f}" for x in end))
        axis, (*_, colour, line) = axes[0 if bits == 8 else 1], ARMS[arm]
        axis.plot(mean, line, color=colour, label=arm)
        axis.set(title=f"engine in {bits} bits", xlabel="iteration", ylabel="reward, mean of runs")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    plt.savefig(args.out / "collapse_training.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
