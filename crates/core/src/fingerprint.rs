//! FarmHash's Fingerprint64 (Geoff Pike, Google, 2014): the keys of strings.
//!
//! The fingerprint of a string never changes. TensorFlow has it as `tf.fingerprint`, BigQuery as `FARM_FINGERPRINT`, Guava as
//! `farmHashFingerprint64`. The crate `farmhash` 1.1.5 gives others where the length is a multiple of 64, from 128 on.

const K0: u64 = 0xc3a5_c85c_97cb_3127;
const K1: u64 = 0xb492_b66f_be98_f273;
const K2: u64 = 0x9ae1_6a3b_2f90_404f;
const BLOCK: usize = 64;

/// Returns the fingerprint of some bytes.
pub fn fingerprint64(bytes: &[u8]) -> u64 {
    match bytes.len() {
        0..=16 => of_up_to_16(bytes),
        17..=32 => of_up_to_32(bytes),
        33..=64 => of_up_to_64(bytes),
        _ => of_blocks(bytes),
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn half_word(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes")))
}

fn mix(x: u64) -> u64 {
    x ^ (x >> 47)
}

/// Hashes 128 bits to 64, as in MurmurHash.
fn combine(low: u64, high: u64, multiplier: u64) -> u64 {
    let a = mix((low ^ high).wrapping_mul(multiplier));
    mix((high ^ a).wrapping_mul(multiplier)).wrapping_mul(multiplier)
}

fn of_up_to_16(bytes: &[u8]) -> u64 {
    let len = bytes.len();
    let multiplier = K2.wrapping_add(2 * len as u64);
    if len >= 8 {
        let a = word(bytes, 0).wrapping_add(K2);
        let b = word(bytes, len - 8);
        let c = b.rotate_right(37).wrapping_mul(multiplier).wrapping_add(a);
        let d = a.rotate_right(25).wrapping_add(b).wrapping_mul(multiplier);
        combine(c, d, multiplier)
    } else if len >= 4 {
        combine((len as u64).wrapping_add(half_word(bytes, 0) << 3), half_word(bytes, len - 4), multiplier)
    } else if len > 0 {
        let [first, middle, last] = [0, len / 2, len - 1].map(|at| u64::from(bytes[at]));
        let y = first + (middle << 8);
        let z = len as u64 + (last << 2);
        mix(y.wrapping_mul(K2) ^ z.wrapping_mul(K0)).wrapping_mul(K2)
    } else {
        K2
    }
}

/// Hashes four words and a seed to 128 bits.
fn combine_four([a, b, c, d]: [u64; 4], seed: u64) -> (u64, u64) {
    (
        a.wrapping_add(b).rotate_right(43).wrapping_add(c.rotate_right(30)).wrapping_add(d),
        a.wrapping_add(b.wrapping_add(seed).rotate_right(18)).wrapping_add(c),
    )
}

/// Hashes the first and the last 16 bytes to 128 bits. `first`: the first word, multiplied.
fn combine_ends(bytes: &[u8], first: u64, multiplier: u64) -> (u64, u64) {
    let len = bytes.len();
    let last = [word(bytes, len - 8).wrapping_mul(multiplier), word(bytes, len - 16).wrapping_mul(K2)];
    combine_four([first, word(bytes, 8), last[0], last[1]], K2)
}

fn of_up_to_32(bytes: &[u8]) -> u64 {
    let multiplier = K2.wrapping_add(2 * bytes.len() as u64);
    let (low, high) = combine_ends(bytes, word(bytes, 0).wrapping_mul(K1), multiplier);
    combine(low, high, multiplier)
}

fn of_up_to_64(bytes: &[u8]) -> u64 {
    let len = bytes.len();
    let multiplier = K2.wrapping_add(2 * len as u64);
    let first = word(bytes, 0).wrapping_mul(K2);
    let (low, high) = combine_ends(bytes, first, multiplier);
    let c = low.wrapping_add(word(bytes, len - 32)).wrapping_mul(multiplier);
    let d = combine(low, high, multiplier).wrapping_add(word(bytes, len - 24)).wrapping_mul(multiplier);
    let (low, high) = combine_four([word(bytes, 16).wrapping_mul(multiplier), word(bytes, 24), c, d], first);
    combine(low, high, multiplier)
}

/// State of a long string: 56 bytes.
struct State {
    x: u64,
    y: u64,
    z: u64,
    v: (u64, u64),
    w: (u64, u64),
}

impl State {
    /// Takes in a block. `weight`: of the part of `w` and `v` that the last block weighs differently.
    fn add(&mut self, block: &[u8], multiplier: u64, weight: u64) {
        let State { x, y, z, v, w } = self;
        let sum = x.wrapping_add(*y).wrapping_add(v.0).wrapping_add(word(block, 8));
        *x = sum.rotate_right(37).wrapping_mul(multiplier);
        *y = y.wrapping_add(v.1).wrapping_add(word(block, 48)).rotate_right(42).wrapping_mul(multiplier);
        *x ^= w.1.wrapping_mul(weight);
        *y = y.wrapping_add(v.0.wrapping_mul(weight)).wrapping_add(word(block, 40));
        *z = z.wrapping_add(w.0).rotate_right(33).wrapping_mul(multiplier);
        *v = weak(&block[..32], v.1.wrapping_mul(multiplier), x.wrapping_add(w.0));
        *w = weak(&block[32..], z.wrapping_add(w.1), y.wrapping_add(word(block, 16)));
        std::mem::swap(z, x);
    }
}

/// A weak hash of 32 bytes and two seeds.
fn weak(bytes: &[u8], a: u64, b: u64) -> (u64, u64) {
    let [w, x, y, z] = [0, 8, 16, 24].map(|at| word(bytes, at));
    let a = a.wrapping_add(w);
    let b = b.wrapping_add(a).wrapping_add(z).rotate_right(21);
    let c = a.wrapping_add(x).wrapping_add(y);
    (c.wrapping_add(z), b.wrapping_add(c.rotate_right(44)).wrapping_add(a))
}

fn of_blocks(bytes: &[u8]) -> u64 {
    const SEED: u64 = 81;
    let y = SEED.wrapping_mul(K1).wrapping_add(113);
    let z = mix(y.wrapping_mul(K2).wrapping_add(113)).wrapping_mul(K2);
    let x = SEED.wrapping_mul(K2).wrapping_add(word(bytes, 0));
    let mut state = State { x, y, z, v: (0, 0), w: (0, 0) };
    let len = bytes.len();
    // The last 64 bytes are always a block of their own, which may overlap the one before.
    for block in bytes[..(len - 1) / BLOCK * BLOCK].chunks_exact(BLOCK) {
        state.add(block, K1, 1);
    }
    let multiplier = K1.wrapping_add((state.z & 0xff) << 1);
    state.w.0 = state.w.0.wrapping_add((len as u64 - 1) & 63);
    state.v.0 = state.v.0.wrapping_add(state.w.0);
    state.w.0 = state.w.0.wrapping_add(state.v.0);
    state.add(&bytes[len - BLOCK..], multiplier, 9);
    let State { x, y, z, v, w } = state;
    // `add` has swapped x and z.
    let low = combine(v.0, w.0, multiplier).wrapping_add(mix(y).wrapping_mul(K0)).wrapping_add(z);
    combine(low, combine(v.1, w.1, multiplier).wrapping_add(x), multiplier)
}

#[cfg(test)]
mod tests {
    use super::fingerprint64;

    /// What `tf.fingerprint` gives for the alphabet, repeated to a length.
    const OF_ALPHABET: [(usize, u64); 14] = [
        (0, 11160318154034397263),
        (1, 12917804110809363939),
        (3, 2640714258260161385),
        (4, 1897425971756105985),
        (7, 4341691227789030229),
        (8, 18368443631171807497),
        (16, 6080716761534418621),
        (17, 11394395984755135400),
        (32, 18417110746069939610),
        (33, 2004761416539416594),
        (64, 11261912070464707578),
        (65, 2608948203458330154),
        (128, 14061449006046005066),
        (200, 2725806534515858166),
    ];

    #[test]
    fn fingerprints_are_those_of_tensorflow() {
        for (len, fingerprint) in OF_ALPHABET {
            let text: Vec<u8> = (b'a'..=b'z').cycle().take(len).collect();
            assert_eq!(fingerprint64(&text), fingerprint, "{len} bytes");
        }
    }
}
