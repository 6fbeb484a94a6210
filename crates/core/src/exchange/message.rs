//! Messages between ranks.

use std::fmt;

use crate::error::{Error, Result};
use crate::row_type::RowType;

/// A call that needs other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Call {
    /// All ranks wait for each other.
    Barrier = 0,
    /// One rank sends to all.
    Broadcast = 1,
    /// Each rank sends to all.
    Gather = 2,
    /// Each rank gets the same sum.
    Reduce = 3,
    /// The lookup of a layer.
    Lookup = 4,
    /// The commit of an optimizer's layers.
    Commit = 5,
    /// The sum of the gradients of dense variables.
    Gradients = 6,
    /// A method of a table.
    Table = 7,
    /// A dump.
    Dump = 8,
    /// The load of a dump.
    Load = 9,
    /// A rank whose GPU waits for others asks whether theirs wait, too.
    Wait = 10,
}

impl Call {
    const ALL: [Call; 11] = [
        Call::Barrier,
        Call::Broadcast,
        Call::Gather,
        Call::Reduce,
        Call::Lookup,
        Call::Commit,
        Call::Gradients,
        Call::Table,
        Call::Dump,
        Call::Load,
        Call::Wait,
    ];

    fn name(self) -> &'static str {
        match self {
            Call::Barrier => "barrier",
            Call::Broadcast => "broadcast",
            Call::Gather => "gather",
            Call::Reduce => "all_reduce",
            Call::Lookup => "lookup",
            Call::Commit => "commit",
            Call::Gradients => "sum of gradients",
            Call::Table => "call of a table",
            Call::Dump => "dump",
            Call::Load => "load",
            Call::Wait => "wait of a GPU",
        }
    }
}

/// Names a message, so that it reaches the call that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// The call.
    pub call: Call,
    /// Number of the layer, counted from 1 in the order in which layers were made. 0: the call is of no layer.
    pub layer: u32,
    /// Number of the call among those of its kind and layer, counted from 1.
    pub step: u64,
    /// Number of the exchange in the call.
    pub round: u8,
}

impl Tag {
    /// Bytes of a tag on its way.
    pub const BYTES: usize = 16;

    /// The same call, at another exchange.
    pub fn at(self, round: u8) -> Tag {
        Tag { round, ..self }
    }

    /// Returns the tag as it travels. Bytes 2 and 3 are 0.
    pub fn to_bytes(self) -> [u8; Tag::BYTES] {
        let mut bytes = [0; Tag::BYTES];
        (bytes[0], bytes[1]) = (self.call as u8, self.round);
        bytes[4..8].copy_from_slice(&self.layer.to_le_bytes());
        bytes[8..].copy_from_slice(&self.step.to_le_bytes());
        bytes
    }

    /// Returns the tag that has come, or `None` if it is none.
    pub fn from_bytes(bytes: [u8; Tag::BYTES]) -> Option<Tag> {
        let [call, round, _, _, a, b, c, d, step @ ..] = bytes;
        let call = Call::ALL.into_iter().find(|known| *known as u8 == call)?;
        let (layer, step) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(step));
        Some(Tag { call, layer, step, round })
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layer {
            0 => write!(to, "{} {}", self.call.name(), self.step),
            layer => write!(to, "{} {} of layer {layer}", self.call.name(), self.step),
        }
    }
}

/// Writes the parts of a message.
#[derive(Default)]
pub struct Writer {
    bytes: Vec<u8>,
    row_type: RowType,
}

impl Writer {
    /// Writes a message whose rows travel in this type.
    pub fn new(row_type: RowType) -> Writer {
        Writer { bytes: Vec::new(), row_type }
    }

    /// Makes room for so many more bytes, so that appending them moves nothing.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        crate::memory::reserve(&mut self.bytes, bytes, WHAT)
    }

    /// Appends a number.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn number(&mut self, number: u64) -> Result<()> {
        self.all(&[number], u64::to_le_bytes)
    }

    /// Appends numbers.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn numbers(&mut self, numbers: &[u64]) -> Result<()> {
        self.all(numbers, u64::to_le_bytes)
    }

    /// Appends numbers of 32 bits.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn words(&mut self, words: &[u32]) -> Result<()> {
        self.all(words, u32::to_le_bytes)
    }

    /// Appends floats.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn floats(&mut self, floats: &[f32]) -> Result<()> {
        self.all(floats, f32::to_le_bytes)
    }

    /// Appends numbers of rows or gradients.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn rows(&mut self, rows: &[f32]) -> Result<()> {
        let start = self.bytes.len();
        crate::memory::resize(&mut self.bytes, start + rows.len() * self.row_type.num_bytes(), 0, WHAT)?;
        self.row_type.write(rows, &mut self.bytes[start..]);
        Ok(())
    }

    fn all<T: Copy, const N: usize>(&mut self, values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Result<()> {
        let start = self.bytes.len();
        crate::memory::resize(&mut self.bytes, start + values.len() * N, 0, WHAT)?;
        self.bytes[start..]
            .as_chunks_mut()
            .0
            .iter_mut()
            .zip(values)
            .for_each(|(to, value)| *to = bytes(*value));
        Ok(())
    }

    /// Returns the message.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

const WHAT: &str = "a message to another rank";

/// Reads the parts of a message in the order in which they were written.
pub struct Reader<'a> {
    rest: &'a [u8],
    from: usize,
    row_type: RowType,
}

impl<'a> Reader<'a> {
    /// Reads a message of rank `from`.
    pub fn new(message: &'a [u8], from: usize) -> Reader<'a> {
        Reader { rest: message, from, row_type: RowType::Float32 }
    }

    /// The same message, whose rows have come in this type.
    pub fn with_row_type(self, row_type: RowType) -> Reader<'a> {
        Reader { row_type, ..self }
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8]> {
        let (now, later) = self.rest.split_at_checked(bytes).ok_or_else(|| self.is_short())?;
        self.rest = later;
        Ok(now)
    }

    fn is_short(&self) -> Error {
        Error::Rank {
            rank: self.from,
            what: "sent a message of another length than this rank expects".into(),
        }
    }

    /// Reads a number.
    ///
    /// # Errors
    /// [`Error::Rank`] at the end of the message. The other methods fail in the same way.
    pub fn number(&mut self) -> Result<u64> {
        let bytes = self.take(8)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
    }

    /// Appends `len` numbers to `to`.
    ///
    /// # Errors
    /// As `number`, and [`Error::Memory`].
    pub fn numbers(&mut self, len: usize, to: &mut Vec<u64>) -> Result<()> {
        let bytes = self.take(len.checked_mul(8).ok_or_else(|| self.is_short())?)?;
        crate::memory::reserve(to, len, WHAT)?;
        to.extend(bytes.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes)));
        Ok(())
    }

    /// Reads `len` numbers of 32 bits.
    ///
    /// # Errors
    /// As `numbers`.
    pub fn words(&mut self, len: usize) -> Result<Vec<u32>> {
        let bytes = self.take(len.checked_mul(4).ok_or_else(|| self.is_short())?)?;
        crate::memory::collect(bytes.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)), WHAT)
    }

    /// Reads as many floats as `to` has room for.
    ///
    /// # Errors
    /// As `number`.
    pub fn floats(&mut self, to: &mut [f32]) -> Result<()> {
        let bytes = self.take(size_of_val(to))?;
        to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, &bytes)| *to = f32::from_le_bytes(bytes));
        Ok(())
    }

    /// Reads as many numbers of rows or gradients as `to` has room for.
    ///
    /// # Errors
    /// As `number`.
    pub fn rows(&mut self, to: &mut [f32]) -> Result<()> {
        let bytes = self.take(to.len() * self.row_type.num_bytes())?;
        self.row_type.read(bytes, to);
        Ok(())
    }

    /// Appends `len` numbers of rows or gradients to `to`.
    ///
    /// # Errors
    /// As `numbers`.
    pub fn append_rows(&mut self, len: usize, to: &mut Vec<f32>) -> Result<()> {
        let num_bytes = len.checked_mul(self.row_type.num_bytes()).ok_or_else(|| self.is_short())?;
        let bytes = self.take(num_bytes)?;
        crate::memory::reserve(to, len, WHAT)?;
        let start = to.len();
        to.resize(start + len, 0.0);
        self.row_type.read(bytes, &mut to[start..]);
        Ok(())
    }

    /// Checks that the message ends here.
    ///
    /// # Errors
    /// [`Error::Rank`] if it does not.
    pub fn finish(self) -> Result<()> {
        if self.rest.is_empty() { Ok(()) } else { Err(self.is_short()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_come_back_and_strange_ones_do_not() {
        let tag = Tag { call: Call::Commit, layer: 7, step: 1 << 40, round: 2 };
        assert_eq!(Tag::from_bytes(tag.to_bytes()), Some(tag));
        let mut bytes = tag.to_bytes();
        bytes[0] = 200;
        assert_eq!(Tag::from_bytes(bytes), None);
        assert_eq!(tag.to_string(), "commit 1099511627776 of layer 7");
        assert_eq!(Tag { call: Call::Barrier, layer: 0, step: 3, round: 0 }.to_string(), "barrier 3");
    }

    #[test]
    fn parts_come_back_in_order() {
        let mut writer = Writer::default();
        writer.number(3).unwrap();
        writer.numbers(&[1, u64::MAX, 5]).unwrap();
        writer.floats(&[1.5, -0.0]).unwrap();
        writer.words(&[u32::MAX, 7]).unwrap();
        writer.rows(&[2.5]).unwrap();
        let message = writer.finish();
        let mut reader = Reader::new(&message, 1);
        let (mut numbers, mut floats) = (Vec::new(), [9.0; 2]);
        assert_eq!(reader.number().unwrap(), 3);
        reader.numbers(3, &mut numbers).unwrap();
        reader.floats(&mut floats).unwrap();
        assert_eq!(
            (&numbers[..], floats.map(f32::to_bits)),
            (&[1, u64::MAX, 5][..], [1.5f32, -0.0].map(f32::to_bits))
        );
        assert_eq!(reader.words(2).unwrap(), [u32::MAX, 7]);
        reader.rows(&mut floats[1..]).unwrap();
        assert_eq!(floats[1], 2.5);
        assert!(reader.number().unwrap_err().to_string().contains("rank 1"));
        assert!(Reader::new(&message, 0).words(usize::MAX).is_err());
        assert!(Reader::new(&message, 0).numbers(usize::MAX, &mut numbers).is_err());
        assert!(Reader::new(&message, 0).finish().is_err());
    }

    #[test]
    fn rows_travel_in_the_type_of_the_message() {
        const NEAR_ONE: f32 = 1.0 + 1.0 / 256.0;
        for (row_type, row, expected) in [
            (RowType::Float32, NEAR_ONE, NEAR_ONE),
            (RowType::Float16, NEAR_ONE, NEAR_ONE),
            (RowType::Bfloat16, NEAR_ONE, 1.0),
        ] {
            let mut writer = Writer::new(row_type);
            writer.rows(&[row, -3.0, 0.5]).unwrap();
            let message = writer.finish();
            assert_eq!(message.len(), 3 * row_type.num_bytes());
            let mut reader = Reader::new(&message, 0).with_row_type(row_type);
            let mut rows = vec![5.0, 9.0];
            reader.rows(&mut rows[1..]).unwrap();
            reader.append_rows(2, &mut rows).unwrap();
            assert_eq!(rows, [5.0, expected, -3.0, 0.5]);
            assert!(reader.append_rows(1, &mut rows).is_err());
        }
    }
}
