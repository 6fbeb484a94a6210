//! Keys and their hash. Each of the 2^64 patterns of 64 bits is a legal key. This is the only place in Rust where keys are hashed.

/// An id as a table stores it: the bits of an `i64` or `u64`. An `i32` is extended with its sign, a `u32` with zeros.
pub type Key = u64;

/// Hashes a key by the 64-bit finaliser of MurmurHash3 (Austin Appleby, public domain).
///
/// It is a bijection in which each bit of the key reaches each bit of the hash. Thus no two keys share a hash, and keys like
/// `i << 32` spread over any range of hash bits.
#[inline(always)]
pub fn hash(key: Key) -> u64 {
    let mut h = key;
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ (h >> 33)
}
