"""Every dtype that a residual can have, bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.cases.case import Case, matrix, ramp, registered


@registered
def dtype_bfloat16() -> Case:
    args = (matrix().astype(jnp.bfloat16), ramp().astype(jnp.bfloat16))
    return Case(fn=lambda w, x: jnp.tanh(x @ w), args=args, saveable_args=(False, True))


@registered
def dtype_float16() -> Case:
    return Case(fn=lambda x: jnp.sin(x) * x, args=(ramp().astype(jnp.float16),))


def _quantized(dtype: Any, numbers: Any = None, **options: Any) -> Case:
    """A layer that is rematerialized, so that its quantized weights are a residual as they are."""
    weights = (jnp.arange(16).reshape(4, 4) if numbers is None else numbers).astype(dtype)

    @jax.checkpoint
    def layer(x: Any, q: Any, scale: Any) -> Any:
        return jnp.tanh((q.astype(jnp.float32) * scale) @ x)

    return Case(fn=layer, args=(ramp(), weights, jnp.float32(0.05)), **options)


@registered
def dtype_float8_e4m3fn() -> Case:
    return _quantized(jnp.float8_e4m3fn)


@registered
def dtype_float8_e4m3b11fnuz() -> Case:
    return _quantized(jnp.float8_e4m3b11fnuz)


@registered
def dtype_float8_e5m2() -> Case:
    return _quantized(jnp.float8_e5m2)


@registered
def dtype_float8_e5m2fnuz() -> Case:
    return _quantized(jnp.float8_e5m2fnuz)


@registered
def dtype_float8_e4m3fnuz() -> Case:
    return _quantized(jnp.float8_e4m3fnuz)


@registered
def dtype_float8_e4m3() -> Case:
    return _quantized(jnp.float8_e4m3)


@registered
def dtype_float8_e3m4() -> Case:
    return _quantized(jnp.float8_e3m4)


@registered
def dtype_float8_e8m0fnu() -> Case:
    # It has no zero and no sign: byte 0 is 2**-127.
    return _quantized(jnp.float8_e8m0fnu, 2.0 ** jnp.arange(-8, 8).reshape(4, 4))


def _kept(dtype: Any, **options: Any) -> Case:
    """A rule that saves an array of a dtype which XLA for CPU cannot compute with."""
    kept = jnp.asarray(np.arange(8).astype(dtype).reshape(2, 4))

    @jax.custom_vjp
    def sine(x: Any) -> Any:
        return jnp.sin(x)

    sine.defvjp(lambda x: (sine(x), (x, kept)), lambda saved, g: (g * jnp.cos(saved[0]),))
    return Case(fn=sine, args=(ramp(),), leaves=2, **options)


@registered
def dtype_float6_e2m3fn() -> Case:
    return _kept(jnp.float6_e2m3fn, export_fails="float6_e2m3fn")


@registered
def dtype_float6_e3m2fn() -> Case:
    return _kept(jnp.float6_e3m2fn, export_fails="float6_e3m2fn")


@registered
def dtype_float4_e2m1fn() -> Case:
    return _quantized(jnp.float4_e2m1fn)


@registered
def dtype_int4() -> Case:
    return _quantized(jnp.int4, jnp.arange(-8, 8).reshape(4, 4))


@registered
def dtype_uint4() -> Case:
    return _quantized(jnp.uint4)


@registered
def dtype_int2() -> Case:
    return _quantized(jnp.int2, jnp.arange(16).reshape(4, 4) % 4 - 2, export_fails="int2")


@registered
def dtype_uint2() -> Case:
    return _quantized(jnp.uint2, jnp.arange(16).reshape(4, 4) % 4, export_fails="uint2")


@registered
def dtype_integers_of_all_widths() -> Case:
    numbers = [
        jnp.arange(4).astype(dtype)
        for dtype in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32)
    ]

    @jax.checkpoint
    def weighted(x: Any, numbers: Any) -> Any:
        return jnp.sin(x * sum(number.astype(jnp.float32) * 0.1 for number in numbers))

    return Case(fn=weighted, args=(ramp(), numbers))


@registered
def dtype_complex64() -> Case:
    return Case(fn=lambda z: jnp.abs(z * z) + jnp.real(z), args=(jnp.array([1 + 2j, 3 - 1j, -0.5j]),))


@registered
def dtype_bool_mask() -> Case:
    return Case(fn=lambda x: jnp.where(x > 0.7, x * x, jnp.sin(x)), args=(ramp(),))


@registered
def dtype_bool_relu_dropout() -> Case:
    key = jax.random.key(3)

    def dropped(x: Any) -> Any:
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, jax.nn.relu(x - 0.6) / 0.5, 0)

    return Case(fn=dropped, args=(ramp(13),))


def _noisy(key: Any, **options: Any) -> Case:
    """Noise that is made again in the backward, so that the key itself is a residual."""

    @jax.checkpoint
    def noisy(x: Any, key: Any) -> Any:
        noise = jax.random.normal(key if key.shape == () else key[0], x.shape)
        return jnp.sum(jnp.sin(x) * noise)

    return Case(fn=noisy, args=(ramp(), key), **options)


@registered
def dtype_prng_key_threefry() -> Case:
    return _noisy(jax.random.key(0))


@registered
def dtype_prng_key_array() -> Case:
    return _noisy(jax.random.split(jax.random.key(1), 3))


@registered
def dtype_prng_key_rbg() -> Case:
    return _noisy(jax.random.key(5, impl="rbg"))


@registered
def dtype_prng_key_unsafe_rbg() -> Case:
    return _noisy(jax.random.key(6, impl="unsafe_rbg"))


@registered
def dtype_prng_key_not_saveable() -> Case:
    return _noisy(jax.random.key(7), saveable_args=(True, False), leaves=1)


@registered
def dtype_prng_key_as_output() -> Case:
    return Case(fn=lambda x, key: (jnp.sin(x) * x, jax.random.split(key)), args=(ramp(), jax.random.key(2)))


@registered
def dtype_weak_type_scalars() -> Case:
    return Case(fn=lambda a, b: a * b, args=(jnp.asarray(2.0), jnp.asarray(3.0)))


@registered
def dtype_x64_float64() -> Case:
    return Case(fn=lambda x: jnp.sin(x) * x, args=(np.arange(1.0, 5.0) / 3,), x64=True)


@registered
def dtype_x64_complex128() -> Case:
    return Case(fn=lambda z: jnp.sin(z) * z, args=(np.array([1 + 2j, 0.3 - 1j]) / 3,), x64=True)


@registered
def dtype_x64_int64_indices() -> Case:
    return Case(fn=lambda x, i: jnp.tanh(x[i]), args=(np.arange(1.0, 5.0) / 7, np.array([3, 1, 1])), x64=True)


@registered
def dtype_numpy_int64_without_x64() -> Case:
    return Case(fn=lambda x, i: jnp.tanh(x[i]), args=(ramp(), np.array([3, 1, 1], np.int64)))


@registered
def dtype_mixed_precision() -> Case:
    def layer(w: Any, x: Any) -> Any:
        product = jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
        return jax.nn.softmax(product)

    return Case(fn=layer, args=(matrix(), ramp()), saveable_args=(False, True))


@registered
def dtype_int_arg_float0_grad() -> Case:
    return Case(fn=lambda x, i: x[i] * 2, args=(ramp(), jnp.array([0, 2])))


@registered
def dtype_bool_arg_float0_grad() -> Case:
    return Case(fn=lambda x, keep: jnp.where(keep, x * x, x), args=(ramp(), jnp.array([True, False] * 2)))


@registered
def dtype_int_output_float0_ct() -> Case:
    return Case(fn=lambda x: {"top": jnp.argmax(x), "value": jnp.max(x * x)}, args=(ramp(),))


@registered
def dtype_nan_inf_negzero_subnormal() -> Case:
    x = jnp.array([jnp.nan, jnp.inf, -jnp.inf, -0.0, 1e-45, 3.4e38])
    return Case(fn=lambda x: x * jnp.arange(1.0, 7.0) * x, args=(x,))


@registered
def dtype_nan_payloads() -> Case:
    bits = np.array([0x7FC00000, 0x7FC12345, 0xFFC00001, 0x7F800001, 0x80000000], np.uint32)
    return Case(fn=lambda x, y: jnp.where(y > 0, x, y * x), args=(bits.view(np.float32), ramp(5)))


@registered
def dtype_all_negative_zero() -> Case:
    return Case(fn=lambda x, y: x * y, args=(jnp.full(9, -0.0), ramp(9)))
