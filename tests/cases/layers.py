"""Operations that models are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.cases.case import Case, matrix, ramp, registered


@registered
def vjp_embedding_gather() -> Case:
    return Case(
        fn=lambda table, ids: jnp.tanh(table[ids]).sum(0),
        args=(matrix(6, 3), jnp.array([5, 0, 5, 2])),
        saveable_args=(False, True),
    )


@registered
def vjp_sort_topk() -> Case:
    weights = jnp.array([3.0, -1.0, 2.0, 0.5])
    return Case(fn=lambda x: jax.lax.top_k(jnp.sort(x * weights), 2)[0], args=(ramp(),))


@registered
def vjp_conv() -> Case:
    images = jnp.arange(2 * 5 * 5, dtype=jnp.float32).reshape(2, 5, 5, 1) * 0.1

    def convolved(x: Any, kernel: Any) -> Any:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout))

    return Case(fn=convolved, args=(images, matrix(3, 3).reshape(3, 3, 1, 1)), saveable_args=(True, False))


@registered
def vjp_attention_block() -> Case:
    def block(p: Any, x: Any) -> Any:
        q, k, v = (x @ p[name] for name in "qkv")
        return x + (jax.nn.softmax(q @ k.T / 2.0) @ v) @ p["o"]

    params = {name: matrix(scale=0.05 * (index + 1)) for index, name in enumerate("qkvo")}
    return Case(fn=block, args=(params, matrix(3, 4)), saveable_args=(False, True), jit=True)


@registered
def vjp_layer_norm_and_cross_entropy() -> Case:
    def loss(p: Any, x: Any, labels: Any) -> Any:
        x = jax.nn.standardize(x, axis=-1) * p["scale"]
        logits = jax.nn.log_softmax(jax.nn.gelu(x) @ p["head"])
        return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()

    args = ({"scale": ramp(), "head": matrix(4, 5)}, matrix(3, 4), jnp.array([4, 0, 2]))
    return Case(fn=loss, args=args, saveable_args=(False, True, True), jit=True)


@registered
def vjp_linear_solve() -> Case:
    a = matrix() + 4 * jnp.eye(4)
    return Case(fn=lambda a, b: jnp.linalg.solve(a, b), args=(a, ramp()))


@registered
def vjp_fft() -> Case:
    return Case(fn=lambda x: jnp.abs(jnp.fft.rfft(jnp.sin(x) * x)), args=(ramp(8),))


@registered
def vjp_scatter_and_dynamic_slice() -> Case:
    def updated(x: Any, update: Any, start: Any) -> Any:
        x = (x * x).at[jnp.array([1, 3, 1])].add(jnp.sin(update))
        return jnp.sin(jax.lax.dynamic_slice(x, (start,), (2,)))

    return Case(fn=updated, args=(ramp(6), ramp(3), jnp.int32(2)))


@registered
def vjp_cumulative_product() -> Case:
    return Case(fn=lambda x: jax.lax.associative_scan(jnp.multiply, x) + jnp.cumsum(x * x), args=(ramp(),))


@registered
def vjp_vmap_inside() -> Case:
    return Case(
        fn=lambda xs, w: jax.vmap(lambda x: jnp.sin(x @ w))(xs),
        args=(matrix(3, 4), matrix(4, 2)),
        saveable_args=(True, False),
    )


@registered
def vjp_of_a_gradient() -> Case:
    return Case(fn=jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)), args=(matrix(), ramp()))


@registered
def vjp_einsum_with_precision() -> Case:
    def product(a: Any, b: Any) -> Any:
        return jnp.einsum("bij,bjk->bik", jnp.sin(a), b, precision=jax.lax.Precision.HIGHEST)

    args = (jnp.stack([matrix(2, 3), matrix(2, 3, 0.2)]), jnp.stack([matrix(3, 2), matrix(3, 2, 0.3)]))
    return Case(fn=product, args=args, saveable_args=(False, False))
