//! Checksums by block: xxh3-64, small enough to name the place of a fault, large enough to cost no time.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

/// Bytes of a tensor that share a checksum; the last block of a tensor is shorter.
pub const BLOCK_BYTES: usize = 1 << 20;

/// Hexadecimal digits of a checksum.
pub(super) const DIGITS: usize = 16;

/// The xxh3-64 of some bytes; 16 hexadecimal digits in JSON.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checksum(pub u64);

impl Checksum {
    /// The checksum of bytes.
    pub fn of(bytes: &[u8]) -> Checksum {
        Checksum(xxh3_64(bytes))
    }

    /// Lower case alone, so that each checksum is written in one way.
    fn from_digits(digits: &[u8]) -> Option<Checksum> {
        let lower = |d: &u8| matches!(d, b'0'..=b'9' | b'a'..=b'f');
        if digits.len() != DIGITS || !digits.iter().all(lower) {
            return None;
        }
        u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(Checksum)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Checksum, D::Error> {
        let digits = String::deserialize(deserializer)?;
        Checksum::from_digits(digits.as_bytes()).ok_or_else(|| {
            de::Error::custom(format!("a checksum must be 16 hexadecimal digits. Received: {digits}"))
        })
    }
}

/// The checksums of a tensor's blocks, in order; one string of 16 digits a block in JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks(pub Vec<Checksum>);

impl Serialize for Blocks {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0.iter().map(Checksum::to_string).collect::<String>())
    }
}

impl<'de> Deserialize<'de> for Blocks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Blocks, D::Error> {
        let digits = String::deserialize(deserializer)?;
        let blocks = digits.as_bytes().chunks(DIGITS).map(Checksum::from_digits).collect::<Option<Vec<_>>>();
        blocks.map(Blocks).ok_or_else(|| de::Error::custom("checksums must be 16 hexadecimal digits each"))
    }
}

/// Cuts a stream of bytes into blocks and hashes each, however the stream is sliced into calls.
pub(super) struct BlockHasher {
    block: Xxh3,
    filled: usize,
    done: Vec<Checksum>,
}

impl BlockHasher {
    pub fn new() -> BlockHasher {
        BlockHasher { block: Xxh3::new(), filled: 0, done: Vec::new() }
    }

    pub fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.filled));
            self.block.update(now);
            self.filled += now.len();
            bytes = later;
            if self.filled == BLOCK_BYTES {
                self.close_block();
            }
        }
    }

    pub fn finish(mut self) -> Blocks {
        if self.filled > 0 {
            self.close_block();
        }
        Blocks(self.done)
    }

    fn close_block(&mut self) {
        self.done.push(Checksum(self.block.digest()));
        self.block.reset();
        self.filled = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_do_not_depend_on_how_the_stream_is_sliced() {
        let bytes: Vec<u8> = (0..2 * BLOCK_BYTES + 12_345).map(|i| (i * 31 % 251) as u8).collect();
        let expected = Blocks(bytes.chunks(BLOCK_BYTES).map(Checksum::of).collect());
        for slice in [1 << 22, BLOCK_BYTES, 100_003, 4096] {
            let mut hasher = BlockHasher::new();
            bytes.chunks(slice).for_each(|s| hasher.update(s));
            assert_eq!(hasher.finish(), expected, "slices of {slice} bytes");
        }
        assert_eq!(BlockHasher::new().finish(), Blocks::default());
    }

    #[test]
    fn digits_come_back_and_nothing_else_is_taken() {
        let blocks = Blocks(vec![Checksum(0), Checksum(u64::MAX), Checksum(0x0123_4567_89ab_cdef)]);
        let text = serde_json::to_string(&blocks).unwrap();
        assert_eq!(text, "\"0000000000000000ffffffffffffffff0123456789abcdef\"");
        assert_eq!(serde_json::from_str::<Blocks>(&text).unwrap(), blocks);
        for wrong in ["\"0\"", "\"+000000000000000\"", "\"00000000000000FF\"", "\"00000000000000é\"", "7"] {
            assert!(serde_json::from_str::<Blocks>(wrong).is_err(), "{wrong}");
        }
    }
}
