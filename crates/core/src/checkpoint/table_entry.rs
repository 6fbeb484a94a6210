//! What a manifest says of a table.

use safetensors::Dtype;
use serde::{Deserialize, Serialize};

use super::data_file::{DataFile, Tensor};
use crate::contract::records::{Column, Records};
use crate::contract::table::{Contents, Epoch, TableConfig};
use crate::formula::update::Update;
use crate::initializer::Initializer;
use crate::policy::eviction::Score;
use crate::row_type::RowType;

/// A table of a dump.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableEntry {
    /// Name of the table.
    pub name: String,
    /// Floats in a row.
    pub dim: usize,
    /// Type of the numbers of rows: `float32`, or from version 6 on `float16` or `bfloat16`. States are float32.
    pub dtype: RowType,
    /// `None`: a dynamic table.
    pub vocabulary_size: Option<u64>,
    /// Seed of first values.
    pub seed: u64,
    /// Initializer of first values.
    pub initializer: Initializer,
    /// The update whose states are kept; `None` if no optimizer had touched the table.
    pub update: Option<Update>,
    /// States of a record, in order.
    pub states: Vec<StateEntry>,
    /// The scores of the rows, from version 2 on; `None` if the table has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scores: Option<ScoreEntry>,
    /// The ages of the rows, from version 3 on; `None` if they have no time to live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ages: Option<AgeEntry>,
    /// How often keys without a row have come, from version 5 on; `None` if the table has no admission policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sights: Option<SightEntry>,
    /// Number of rows in the files.
    pub num_rows: u64,
    /// Only in an increment: number of rows of the whole table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_rows: Option<u64>,
    /// Files with the rows.
    pub shards: Vec<DataFile>,
    /// Of an increment: files with the keys that were removed since the part before. Each has the tensor `keys` alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<DataFile>,
}

/// The score of each row: the tensor `scores` of each shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreEntry {
    /// What they count.
    pub score: Score,
    /// Number of the step in progress, from 1.
    pub step: u64,
}

/// The age of each row: the tensor `ages` of each shard, how many commits ago it was trained last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgeEntry {
    /// Number of the step in progress, from 1.
    pub step: u64,
    /// When commits were made, as `Table::commit_times` returns it. Empty if the time to live is a number of steps.
    pub times: Vec<(u64, u64)>,
}

/// How often keys without a row have come.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SightEntry {
    /// Number of the step in progress, from 1.
    pub step: u64,
    /// Files with these keys, and how often each has come. Each has the tensors `keys` and `scores` alone.
    pub files: Vec<DataFile>,
}

/// A state beside each row: the tensor `state.<name>` of each shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateEntry {
    /// Name of the state.
    pub name: String,
    /// Floats in a record.
    pub width: usize,
}

impl TableEntry {
    /// Without its shards. `states`: whether the dump has the table's optimizer states.
    pub(super) fn of(table: &dyn Contents, states: bool) -> crate::Result<TableEntry> {
        let config = table.config();
        let layout = table.layout();
        let dumped = if states { layout.states() } else { &[] };
        Ok(TableEntry {
            name: config.name.clone(),
            dim: config.dim,
            dtype: config.row_type,
            vocabulary_size: config.vocabulary_size,
            seed: config.seed,
            initializer: config.initializer,
            update: table.update_rule().copied().filter(|_| states),
            states: dumped
                .iter()
                .map(|s| StateEntry { name: s.name.into(), width: s.columns.len() })
                .collect(),
            scores: match config.eviction {
                Some(eviction) => Some(ScoreEntry { score: eviction.score, step: table.step()? }),
                None => None,
            },
            ages: match config.time_to_live {
                Some(_) => Some(AgeEntry { step: table.step()?, times: table.commit_times() }),
                None => None,
            },
            sights: match config.admission {
                Some(_) => Some(SightEntry { step: table.step()?, files: Vec::new() }),
                None => None,
            },
            num_rows: table.len()? as u64,
            total_rows: None,
            shards: Vec::new(),
            removed: Vec::new(),
        })
    }

    /// As `of`, of the rows that have changed since the start of an epoch.
    pub(super) fn of_changes(table: &dyn Contents, states: bool, since: Epoch) -> crate::Result<TableEntry> {
        let whole = TableEntry::of(table, states)?;
        let num_rows = table.num_changed(since)? as u64;
        Ok(TableEntry { num_rows, total_rows: Some(whole.num_rows), ..whole })
    }

    /// Number of rows of the table.
    pub fn total_rows(&self) -> u64 {
        self.total_rows.unwrap_or(self.num_rows)
    }

    /// The files of the table.
    pub(super) fn files(&self) -> impl Iterator<Item = &DataFile> {
        self.shards.iter().chain(&self.removed).chain(self.sight_files())
    }

    /// Files with the keys that have no row, and how often they have come.
    pub(super) fn sight_files(&self) -> &[DataFile] {
        self.sights.as_ref().map_or(&[], |sights| &sights.files)
    }

    /// The tensors of a file with so many keys without a row.
    pub(super) fn sight_tensors(num_keys: usize) -> Vec<Tensor> {
        let tensor = |name, dtype| Tensor::new(name, dtype, vec![num_keys]);
        vec![tensor("keys", Dtype::I64), tensor(Column::Scores.name(), Dtype::U64)]
    }

    /// Returns the columns of its records.
    pub(super) fn columns(&self) -> Vec<Column> {
        let are_there = [(Column::Scores, self.scores.is_some()), (Column::Ages, self.ages.is_some())];
        are_there.into_iter().filter(|(_, is_there)| *is_there).map(|(column, _)| column).collect()
    }

    /// Returns the number of the step in progress, if the table counted steps.
    pub(super) fn step(&self) -> Option<u64> {
        let step_of_sights = self.sights.as_ref().map(|sights| sights.step);
        let step_of_ages = self.ages.as_ref().map(|ages| ages.step);
        self.scores.as_ref().map(|scores| scores.step).or(step_of_ages).or(step_of_sights)
    }

    /// The tensors of a shard of `num_rows` rows: keys, then what a record holds, in its order, then its columns.
    pub(super) fn tensors(&self, num_rows: usize) -> Vec<Tensor> {
        let states = self.states.iter().map(|s| (format!("state.{}", s.name), s.width));
        let of_rows = match self.dtype {
            RowType::Float32 => Dtype::F32,
            RowType::Float16 => Dtype::F16,
            RowType::Bfloat16 => Dtype::BF16,
        };
        let tensor = |name: String, dtype, width| Tensor::new(name, dtype, vec![num_rows, width]);
        std::iter::once(Tensor::new("keys", Dtype::I64, vec![num_rows]))
            .chain(std::iter::once(tensor("rows".into(), of_rows, self.dim)))
            .chain(states.map(|(name, width)| tensor(name, Dtype::F32, width)))
            .chain(self.columns().into_iter().map(|c| Tensor::new(c.name(), Dtype::U64, vec![num_rows])))
            .collect()
    }

    /// Brings the columns of records to the step of a later entry of the same table.
    pub(super) fn catch_up(&self, later: &TableEntry, records: &mut Records) {
        let (from, to) = (self.step().unwrap_or(1), later.step().unwrap_or(1));
        records.ages.iter_mut().for_each(|age| *age = age.saturating_add(to.saturating_sub(from)));
        if let Some(ScoreEntry { score: Score::Lfu { half_life: Some(every) }, .. }) = self.scores {
            // The steps from `from` on to the one before `to` have ended meanwhile.
            let halvings_before = |step: u64| step.saturating_sub(1).checked_div(every).unwrap_or(0);
            let halvings = halvings_before(to).saturating_sub(halvings_before(from)).min(64);
            let halve = |score: &mut u64| *score = score.checked_shr(halvings as u32).unwrap_or(0);
            records.scores.iter_mut().for_each(halve);
        }
    }

    /// Whether another entry may hold later rows of the same table.
    pub(super) fn is_followed_by(&self, later: &TableEntry) -> bool {
        let kind = |entry: &TableEntry| {
            let score = entry.scores.as_ref().map(|scores| scores.score);
            let policies = (score, entry.ages.is_some(), entry.sights.is_some());
            (entry.name.clone(), (entry.dim, entry.dtype), entry.vocabulary_size, entry.seed, policies)
        };
        kind(self) == kind(later) && self.states == later.states
    }

    pub(super) fn check(&self) -> Result<(), String> {
        if !(1..=TableConfig::MAX_DIM).contains(&self.dim) {
            let (name, most, dim) = (&self.name, TableConfig::MAX_DIM, self.dim);
            return Err(format!("the dim of table `{name}` must be between 1 and {most}: got {dim}"));
        }
        let times = self.ages.iter().flat_map(|ages| ages.times.windows(2));
        for pair in times {
            if pair[0].0 > pair[1].0 || pair[0].1 < pair[1].1 {
                return Err(format!("the times of commits of table `{}` must ascend", self.name));
            }
        }
        let mut num_rows = 0u64;
        for shard in &self.shards {
            let rows = usize::try_from(shard.num_rows()).map_err(|e| e.to_string())?;
            if !has_tensors(shard, &self.tensors(rows)) {
                return Err(format!(
                    "`{}` must hold keys, rows and states of table `{}`",
                    shard.file, self.name
                ));
            }
            shard.check(Some(&self.name))?;
            num_rows = num_rows.checked_add(rows as u64).ok_or("rows must be fewer")?;
        }
        for file in &self.removed {
            let keys = file.tensors.first().filter(|keys| {
                file.tensors.len() == 1
                    && (&*keys.name, keys.dtype, keys.shape.len()) == ("keys", Dtype::I64, 1)
            });
            if keys.is_none() {
                return Err(format!("`{}` must hold keys of table `{}` alone", file.file, self.name));
            }
            file.check(Some(&self.name))?;
        }
        for file in self.sight_files() {
            if !has_tensors(file, &TableEntry::sight_tensors(file.num_rows() as usize)) {
                let (file, name) = (&file.file, &self.name);
                return Err(format!("`{file}` must hold keys and scores of table `{name}` alone"));
            }
            file.check(Some(&self.name))?;
        }
        if num_rows != self.num_rows {
            return Err(format!(
                "table `{}` must have {} rows: its shards hold {num_rows}",
                self.name, self.num_rows
            ));
        }
        Ok(())
    }
}

/// Whether a file has tensors of these names, dtypes and shapes, in this order.
fn has_tensors(file: &DataFile, expected: &[Tensor]) -> bool {
    let kind = |tensor: &Tensor| (tensor.name.clone(), tensor.dtype, tensor.shape.clone());
    file.tensors.iter().map(kind).eq(expected.iter().map(kind))
}
