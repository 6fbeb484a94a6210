//! What a manifest says of a data file: the safetensors header follows from it to the byte.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::checksum::{BLOCK_BYTES, Blocks, Checksum};
use super::names::is_own_name;

/// What the stock reader of safetensors takes at most.
const MAX_HEADER_BYTES: usize = 100_000_000;

/// One safetensors file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataFile {
    /// Its name in the dump's directory.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Of the header with the eight bytes of its length.
    pub header: Checksum,
    /// In the order of their bytes.
    pub tensors: Vec<Tensor>,
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Name of the tensor.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Number of elements along each axis.
    pub shape: Vec<usize>,
    /// Checksum of each block.
    pub blocks: Blocks,
}

impl Tensor {
    pub(super) fn new(name: impl Into<String>, dtype: Dtype, shape: Vec<usize>) -> Tensor {
        Tensor { name: name.into(), dtype, shape, blocks: Blocks::default() }
    }
}

/// Where the bytes of a file's tensors are: follows from their names, dtypes and shapes.
pub(super) struct Layout {
    /// The file's first bytes: eight of length, then JSON, padded so that the tensors are aligned.
    pub header: Vec<u8>,
    /// Places in the file, one a tensor, without gaps.
    pub tensors: Vec<Range<u64>>,
}

impl Layout {
    /// Size of the file.
    pub fn bytes(&self) -> u64 {
        self.tensors.last().map_or(self.header.len() as u64, |t| t.end)
    }
}

impl DataFile {
    pub(super) fn new(file: String, tensors: Vec<Tensor>) -> DataFile {
        DataFile { file, bytes: 0, header: Checksum::default(), tensors }
    }

    /// Rows in a table's shard.
    pub fn num_rows(&self) -> u64 {
        self.tensors.first().and_then(|keys| keys.shape.first()).map_or(0, |&n| n as u64)
    }

    /// The header in safetensors' own rendering; `table` stands in its metadata, for those who find a shard alone.
    ///
    /// # Errors
    /// What is wrong with the names, shapes or sizes.
    pub(super) fn layout(&self, table: Option<&str>) -> Result<Layout, String> {
        // Not a matter of taste: safetensors indexes out of bounds on names that come twice.
        check_distinct("tensor", self.tensors.iter().map(|t| t.name.as_str()))?;
        let mut infos = Vec::with_capacity(self.tensors.len());
        let mut end = 0usize;
        for tensor in &self.tensors {
            let start = end;
            end = tensor.bytes().and_then(|bytes| start.checked_add(bytes)).ok_or_else(|| {
                format!(
                    "tensor `{}` must be a whole number of bytes that fits a file: {} {:?}",
                    tensor.name, tensor.dtype, tensor.shape
                )
            })?;
            let info =
                TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets: (start, end) };
            infos.push((tensor.name.clone(), info));
        }
        let places: Vec<_> = infos.iter().map(|(_, info)| info.data_offsets).collect();
        let metadata = table.map(|name| HashMap::from([("table".to_owned(), name.to_owned())]));
        let metadata = Metadata::new(metadata, infos).map_err(|e| e.to_string())?;
        let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
        json.resize(json.len().next_multiple_of(8), b' ');
        if json.len() > MAX_HEADER_BYTES {
            return Err(format!("a header must be at most {MAX_HEADER_BYTES} bytes: got {}", json.len()));
        }
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        let first = header.len() as u64;
        first.checked_add(end as u64).ok_or("the tensors must fit into a file")?;
        let tensors =
            places.into_iter().map(|(start, end)| first + start as u64..first + end as u64).collect();
        Ok(Layout { header, tensors })
    }

    /// Checks that the size of the file and the number of checksums follow from its tensors. `table`: name of the table whose shard it is.
    pub(super) fn check(&self, table: Option<&str>) -> Result<(), String> {
        if !is_own_name(&self.file) {
            return Err(format!("a file must be named as dumps name theirs: got `{}`", self.file));
        }
        let within = |what: String| format!("`{}`: {what}", self.file);
        let layout = self.layout(table).map_err(within)?;
        if self.bytes != layout.bytes() {
            return Err(within(format!(
                "size must be that of its tensors: expected {}, got {}",
                layout.bytes(),
                self.bytes
            )));
        }
        for (tensor, place) in self.tensors.iter().zip(&layout.tensors) {
            let expected = (place.end - place.start).div_ceil(BLOCK_BYTES as u64);
            if tensor.blocks.0.len() as u64 != expected {
                let got = tensor.blocks.0.len();
                return Err(within(format!(
                    "`{}` must have a checksum a MiB: expected {expected}, got {got}",
                    tensor.name
                )));
            }
        }
        Ok(())
    }
}

impl Tensor {
    /// `None` if they are not whole or too many to count.
    pub(super) fn bytes(&self) -> Option<usize> {
        let elements = self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        let bits = elements.checked_mul(self.dtype.bitsize())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

pub(super) fn check_distinct<'a>(noun: &str, names: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(format!("each {noun} of a dump must have a name of its own: `{name}` comes twice"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_lie_are_refused_without_panic() {
        let layout =
            |tensors: Vec<Tensor>| DataFile::new("f".into(), tensors).layout(None).map(|l| l.bytes());
        let tensor = |name, shape: &[usize]| Tensor::new(name, Dtype::F32, shape.to_vec());
        assert!(layout(vec![]).is_ok());
        assert!(layout(vec![tensor("a", &[]), tensor("b", &[0, 3])]).is_ok());
        assert!(layout(vec![tensor("a", &[1]), tensor("a", &[1])]).is_err());
        assert!(layout(vec![tensor("a", &[usize::MAX, usize::MAX])]).is_err());
        assert!(layout(vec![tensor("a", &[usize::MAX / 4]), tensor("b", &[2])]).is_err());
        assert!(layout(vec![tensor("a", &[usize::MAX / 4])]).is_err());
        assert!(layout(vec![Tensor::new("a", Dtype::F4, vec![3])]).is_err());
    }
}
