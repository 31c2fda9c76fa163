"""What a careful user would write by hand today: forward hooks and a running covariance per head, in float64.

Hooks on q_proj and k_proj, as baukit or plain torch would place them, the model's own cosines and sines from a hook on
its rotary embedding, and sums of vectors, their squares and their products with the position. No position buckets, no
document groups, no errors, nothing before rotation. Nothing here knows qkscope. For models of Llama's shape.
"""

import torch
from sklearn_step import COLUMNS
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class RunningSums:
    """n, Σt, Σt², Σx, Σxt and Σxxᵀ of (heads, tokens, width) vectors, in float64."""

    def __init__(self) -> None:
        self.n, self.t, self.tt = 0, 0.0, 0.0
        self.x = self.xt = self.xx = 0.0

    def add(self, vectors: Tensor) -> None:
        x, t = vectors.double(), torch.arange(vectors.shape[1], dtype=torch.float64)
        self.n, self.t, self.tt = self.n + len(t), self.t + t.sum(), self.tt + (t @ t)
        self.x, self.xt = self.x + x.sum(1), self.xt + t @ x
        self.xx = self.xx + x.transpose(1, 2) @ x

    def r(self, head: int, directions: Tensor) -> Tensor:
        """The correlation of position with the projection on each of (width, components) directions."""
        mean, covariance = self.x[head] / self.n, self.centred(head)
        with_t = (self.xt[head] - self.t * mean) @ directions
        spread = ((directions.T @ covariance) * directions.T).sum(1)
        return with_t / torch.sqrt(spread * (self.tt - self.t**2 / self.n))

    def centred(self, head: int) -> Tensor:
        mean = self.x[head] / self.n
        return self.xx[head] - self.n * torch.outer(mean, mean)


class Watcher:
    """Hooks that sum each layer's rotated queries and keys."""

    def __init__(self, model) -> None:
        self.sums = [(RunningSums(), RunningSums()) for _ in model.layers]
        self._angles, self._query = None, None
        self.open(model)

    def open(self, model) -> None:
        self._hooks = [model.rotary_emb.register_forward_hook(self._turn)]
        for number, layer in enumerate(model.layers):
            attention = layer.self_attn
            self._hooks.append(attention.q_proj.register_forward_hook(self._keep_query))
            self._hooks.append(attention.k_proj.register_forward_hook(self._with_key(number, attention.head_dim)))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _turn(self, module, given, angles) -> None:
        self._angles = angles

    def _keep_query(self, module, given, query) -> None:
        self._query = query

    def _with_key(self, number: int, width: int):
        def add(module, given, key) -> None:
            q, k = (x.unflatten(-1, (-1, width)).transpose(1, 2) for x in (self._query, key))
            self._query = None
            for sums, rotated in zip(self.sums[number], apply_rotary_pos_emb(q, k, *self._angles), strict=True):
                sums.add(rotated[0])

        return add

    def rows(self) -> list[tuple]:
        """The table of sklearn_step.py: ten components of each head's pooled queries and keys."""
        return [
            row
            for layer, both in enumerate(self.sums)
            for head in range(len(both[0].x))
            for row in of(layer, head, both)
        ]


def of(layer: int, head: int, both: tuple[RunningSums, RunningSums]) -> list[tuple]:
    q, k = both
    key_head = head // (len(q.x) // len(k.x))
    apart = q.x[head] / q.n - k.x[key_head] / k.n
    pool = q.centred(head) + k.centred(key_head) + torch.outer(apart, apart) * q.n * k.n / (q.n + k.n)
    values, vectors = torch.linalg.eigh(pool)
    share, top = (values / values.sum()).flip(0)[:10], vectors.flip(1)[:, :10]
    rows = []
    for i, (r_q, r_k) in enumerate(zip(q.r(head, top).tolist(), k.r(key_head, top).tolist(), strict=True)):
        sign = -1 if (r_q if abs(r_q) >= 0.05 else r_k) < 0 else 1
        rows.append((layer, head, i, float(share[i]), sign * r_q, sign * r_k))
    return rows


__all__ = ["COLUMNS", "Watcher"]
