//! A key is a 64-bit pattern, all 2^64 of them legal. The only place in Rust where keys are hashed.

/// The user's id as stored: the bits of an `i64` or `u64`; `i32` sign-extends, `u32` zero-extends.
pub type Key = u64;

/// The 64-bit finaliser of MurmurHash3 (Austin Appleby, public domain): a bijection in which each bit of the key reaches
/// each bit of the hash, so that no two keys share a hash and keys like `i << 32` spread over any range of hash bits.
#[inline(always)]
pub fn hash(key: Key) -> u64 {
    let mut h = key;
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}
