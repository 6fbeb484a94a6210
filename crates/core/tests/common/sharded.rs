//! Groups that several ranks share, each rank a thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sok_core::checkpoint::{
    After, DumpOptions, DumpReader, LoadMode, LoadOptions, Ranks, Target, TargetBinding, dump_of_ranks,
    read_manifest,
};
use sok_core::contract::binding::Binding;
use sok_core::contract::group::Group;
use sok_core::contract::profile::Profile;
use sok_core::contract::table::{Contents, Insertion, Table, TableConfig};
use sok_core::contract::ticket::TICKET_LEN;
use sok_core::error::Result;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::message::{Call, Tag};
use sok_core::exchange::placement::Placement;
use sok_core::exchange::threads::ThreadRank;
use sok_core::formula::update::UpdateScalars;
use sok_core::host::push::OutputGradients;
use sok_core::host::sharded::ShardedGroup;
use sok_core::key::Key;
use sok_core::pool::Pool;
use sok_core::row_type::RowType;

use super::input::Input;
use super::subject::{Kept, Subject, Tickets, all_scalars, lend};
use super::{Dice, unwritten};

/// Long enough for a slow machine; a test that waits for it has failed.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// A rank's part of a group, in the calls of a training step.
pub struct ShardedSubject {
    pub group: ShardedGroup,
    pool: &'static Pool,
    tickets: Tickets,
    held: Vec<Kept>,
}

impl ShardedSubject {
    pub fn new(
        configs: &[(TableConfig, Placement)],
        communicator: Arc<dyn Communicator>,
        merge_blocks: usize,
        row_type: RowType,
        pool: &'static Pool,
    ) -> ShardedSubject {
        let group = ShardedGroup::new(configs.to_vec(), communicator, 1, merge_blocks, row_type).unwrap();
        ShardedSubject { group, pool, tickets: Tickets::default(), held: Vec::new() }
    }

    /// The only rank of its world.
    pub fn alone(configs: &[TableConfig], pool: &'static Pool) -> ShardedSubject {
        let rank = ThreadRank::world(1, TIMEOUT).remove(0);
        let configs: Vec<_> = configs.iter().map(|config| (config.clone(), Placement::Distributed)).collect();
        ShardedSubject::new(&configs, Arc::new(rank), 1, RowType::Float32, pool)
    }
}

impl Subject for ShardedSubject {
    fn name(&self) -> String {
        let communicator = self.group.communicator();
        format!("rank {} of {}", communicator.rank(), communicator.world_size())
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn lookup(&mut self, inputs: &[Input], insertion: Insertion, save: bool) -> Result<(u64, Vec<Vec<f32>>)> {
        let dim = |table: usize| self.group.table(table).config().dim;
        let mut outputs: Vec<Vec<f32>> =
            inputs.iter().map(|i| unwritten(i.bags().len() * dim(i.table))).collect();
        let features: Vec<_> = inputs.iter().map(Input::feature).collect();
        let room = outputs.iter_mut().map(|o| &mut o[..]).collect();
        let number = self.group.lookup(&features, insertion, save, room, self.pool)?;
        Ok((number, outputs))
    }

    fn push(
        &mut self,
        number: u64,
        lookup: u64,
        gradients: &Kept,
        hold: bool,
        ids: &[usize],
    ) -> Result<Vec<Vec<f32>>> {
        let mut weights: Vec<Vec<f32>> = ids.iter().map(|n| unwritten(*n)).collect();
        let mut ticket = unwritten(TICKET_LEN);
        let room = weights.iter_mut().map(|w| &mut w[..]).collect();
        let keep = hold.then(|| Box::new(gradients.clone()) as _);
        let output = OutputGradients { rows: lend(gradients), keep, check_finite: true };
        self.group.push(lookup, output, room, &mut ticket, self.pool)?;
        self.tickets.insert(number, ticket);
        if hold {
            self.held.push(gradients.clone());
        }
        Ok(weights)
    }

    fn ticket(&self, number: u64) -> &[f32] {
        &self.tickets[&number]
    }

    fn commit(&mut self, named: &[(u64, f32)], is_update: bool) -> Result<f64> {
        let ticket = super::subject::sum_of_tickets(&self.tickets, named);
        let binding = Group::binding(&self.group).expect("an optimizer is bound").clone();
        self.group.commit(&binding, &ticket, is_update, self.pool)
    }

    fn apply_by(&mut self, binding: &Binding, update: UpdateScalars, is_update: bool) -> Result<()> {
        if binding.update.rule.is_general() && is_update {
            let scalars = [update.learning_rate, update.step as f32, 1.0, update.factor];
            super::general::update_pieces(&mut self.group, binding, &scalars, 37)?;
        }
        self.group.apply(binding, &all_scalars(update, is_update), self.pool)
    }

    fn bind(&mut self, binding: Binding) -> Result<()> {
        self.group.bind(binding)
    }

    fn binding(&self) -> Option<Binding> {
        Group::binding(&self.group).cloned()
    }

    fn num_tables(&self) -> usize {
        self.group.num_tables()
    }

    fn table(&mut self, number: usize) -> &dyn Table {
        self.group.settle_tables();
        self.group.table(number)
    }

    fn unsettled(&mut self, number: usize) -> &dyn Table {
        self.group.table(number)
    }

    fn table_mut(&mut self, number: usize) -> &mut dyn Table {
        self.group.table_mut(number)
    }

    fn tables(&mut self) -> Vec<&dyn Contents> {
        self.group.settle_tables();
        (0..self.group.num_tables()).map(|number| self.group.table(number) as &dyn Contents).collect()
    }

    fn tables_mut(&mut self) -> Vec<&mut dyn Table> {
        self.group.tables_mut()
    }

    fn pending_pushes(&mut self) -> usize {
        self.group.pending_pushes(true).unwrap()
    }

    fn measure(&mut self, is_on: bool) {
        self.group.measure(is_on);
    }

    fn take_profile(&mut self) -> Profile {
        self.group.take_profile().unwrap()
    }

    fn take_refused(&mut self) -> Vec<(String, u64)> {
        self.group.take_refused()
    }

    fn take_held(&mut self) -> Vec<Kept> {
        std::mem::take(&mut self.held)
    }
}

/// Inserts the keys below `num_keys` that a rank owns, with rows of their own.
pub fn fill(group: &mut ShardedGroup, num_keys: u64) {
    let mut dice = Dice(3);
    for table in 0..group.num_tables() {
        let owners = group.owners(table).unwrap();
        let dim = group.table(table).config().dim;
        let keys: Vec<Key> = (0..num_keys).collect();
        let rows = dice.floats(keys.len() * dim);
        for (key, row) in keys.iter().zip(rows.chunks(dim)) {
            if owners.of(*key) == owners.rank {
                group.table_mut(table).assign(&[*key], row, true).unwrap();
            }
        }
    }
}

fn ranks_of(group: &ShardedGroup, call: Call, step: u64) -> Ranks {
    Ranks { communicator: group.communicator().clone(), tag: Tag { call, layer: 0, step, round: 0 } }
}

/// Dumps the tables of a group. `step`: number of the dump, which the manifest gets as its step.
pub fn save(group: &mut ShardedGroup, path: &Path, overwrite: bool, step: u64) -> Result<()> {
    let ranks = ranks_of(group, Call::Dump, step);
    let tables: Vec<_> = (0..group.num_tables())
        .map(|table| (group.table(table) as &dyn Contents, group.owners(table).unwrap()))
        .collect();
    let options = DumpOptions { overwrite, step, shard_bytes: 1000, ..DumpOptions::default() };
    dump_of_ranks(path, &tables, &[], &options, &ranks).map(drop)
}

/// Tells the tables of a group that the dump in `path` has them as they are.
pub fn track(group: &mut ShardedGroup, path: &Path) {
    let snapshot = read_manifest(path).unwrap().snapshot();
    group.tables_mut().into_iter().for_each(|table| table.track(snapshot).unwrap());
}

/// Dumps what has changed in the tables of a group. `step`: number of the dump, which the increment gets as its step.
pub fn save_increment(group: &mut ShardedGroup, path: &Path, after: After, step: u64) -> Result<()> {
    let ranks = ranks_of(group, Call::Dump, step);
    let tables: Vec<_> = (0..group.num_tables())
        .map(|table| (group.table(table) as &dyn Contents, group.owners(table).unwrap()))
        .collect();
    let options = DumpOptions { after: Some(after), step, shard_bytes: 1000, ..DumpOptions::default() };
    dump_of_ranks(path, &tables, &[], &options, &ranks).map(drop)
}

/// Loads the tables of a group by their names. `step`: number of the load.
pub fn restore(group: &mut ShardedGroup, path: &Path, mode: LoadMode, step: u64) -> Result<()> {
    let ranks = ranks_of(group, Call::Load, step);
    let rank = group.communicator().rank();
    let parts: Vec<_> = (0..group.num_tables())
        .map(|table| (group.table(table).config().name.clone(), group.owners(table)))
        .collect();
    let tables = group.tables_mut().into_iter().zip(&parts);
    let mut targets: Vec<Target> = tables
        .map(|(table, (name, owners))| Target { name, table, binding: TargetBinding::Bound, owners: *owners })
        .collect();
    // Each rank has them in an order of its own.
    let count = targets.len();
    targets.rotate_left(rank % count);
    DumpReader::open(path)?.load(&mut targets, &LoadOptions { mode, states: true }, Some(&ranks)).map(drop)
}

/// A directory that is gone at the end of the test.
pub struct Directory(pub PathBuf);

impl Directory {
    pub fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("sok-ranks-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
