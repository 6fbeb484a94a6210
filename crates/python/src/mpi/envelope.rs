//! What precedes the content of a message: 8 bytes length of the content, 16 bytes tag, 4 bytes rank of the sender, 4 bytes 0.

use sok_core::exchange::message::Tag;

/// Says what a message is. MPI's own tags have too few bits, and where a status has the sender differs between libraries.
pub struct Envelope {
    pub len: usize,
    pub tag: Tag,
    pub from: usize,
}

/// Where the rank of the sender begins.
const FROM: usize = 8 + Tag::BYTES;

impl Envelope {
    pub const BYTES: usize = FROM + 8;

    pub fn to_bytes(&self) -> [u8; Envelope::BYTES] {
        let mut bytes = [0; Envelope::BYTES];
        bytes[..8].copy_from_slice(&(self.len as u64).to_le_bytes());
        bytes[8..FROM].copy_from_slice(&self.tag.to_bytes());
        bytes[FROM..FROM + 4].copy_from_slice(&(self.from as u32).to_le_bytes());
        bytes
    }

    /// Reads an envelope of another rank. `None`: the bytes are none.
    pub fn from_bytes(bytes: &[u8]) -> Option<Envelope> {
        let (len, rest) = bytes.split_first_chunk()?;
        let (tag, rest) = rest.split_first_chunk()?;
        let (from, _) = rest.split_first_chunk()?;
        let (len, from) = (u64::from_le_bytes(*len) as usize, u32::from_le_bytes(*from) as usize);
        Some(Envelope { len, tag: Tag::from_bytes(*tag)?, from })
    }
}
