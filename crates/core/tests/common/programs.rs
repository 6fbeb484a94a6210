//! Programs of a global batch, of which each rank makes its share.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};

use sok_core::checkpoint::LoadMode;
use sok_core::contract::binding::UpdateMode;
use sok_core::contract::table::TableConfig;
use sok_core::exchange::communicator::Communicator;
use sok_core::exchange::placement::Placement;
use sok_core::exchange::tcp::TcpRank;
use sok_core::exchange::threads::ThreadRank;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::key::Key;
use sok_core::pool::Pool;
use sok_core::row_type::RowType;

use super::input::Input;
use super::ranks::{GlobalStep, Then, part_of, share};
use super::sharded::{ShardedSubject, TIMEOUT, restore, save};
use super::subject::{OWNER, Subject, binding_of};
use super::{bits, scan};

pub static POOLS: LazyLock<[Pool; 2]> = LazyLock::new(|| [1, 3].map(|threads| Pool::new(threads).unwrap()));

/// Steps that are made one after the other, between a load and a dump.
#[derive(Clone, Copy)]
pub struct Program<'a> {
    pub configs: &'a [(TableConfig, Placement)],
    pub update: Update,
    pub steps: &'a [GlobalStep],
    /// Number of the first step.
    pub first: u64,
    pub merge_blocks: usize,
    pub row_type: RowType,
    /// Whether the shares of a batch are equal.
    pub is_even: bool,
    pub load: Option<&'a Path>,
    pub dump: Option<&'a Path>,
}

/// What ranks saw and have in the end.
#[derive(Default)]
pub struct Seen {
    /// By step and feature.
    pub outputs: Vec<Vec<Vec<f32>>>,
    pub norms: Vec<u64>,
    pub tables: Vec<BTreeMap<Key, Vec<u32>>>,
}

impl Seen {
    /// Compares bits.
    pub fn check_same(&self, other: &Seen, what: &str) {
        for (step, (one, many)) in self.outputs.iter().zip(&other.outputs).enumerate() {
            for (feature, (one, many)) in one.iter().zip(many).enumerate() {
                assert_eq!(bits(one), bits(many), "{what}: step {step}, feature {feature}");
            }
        }
        assert_eq!(self.outputs.len(), other.outputs.len(), "{what}");
        assert_eq!(self.norms, other.norms, "{what}");
        assert!(self.tables == other.tables, "{what}: rows or states");
    }
}

/// Steps from the first one, in twelve blocks of equal shares, with neither load nor dump.
pub fn program<'a>(
    configs: &'a [(TableConfig, Placement)],
    update: Update,
    steps: &'a [GlobalStep],
) -> Program<'a> {
    Program {
        configs,
        update,
        steps,
        first: 1,
        merge_blocks: 12,
        row_type: RowType::Float32,
        is_even: true,
        load: None,
        dump: None,
    }
}

impl Program<'_> {
    /// Runs the program on a rank's share of each batch.
    fn run_rank(&self, communicator: Arc<dyn Communicator>) -> Seen {
        let (rank, world_size) = (communicator.rank(), communicator.world_size());
        let placed = |(config, placement): &(TableConfig, Placement)| match *placement {
            Placement::Localized(home) => (config.clone(), Placement::Localized(home % world_size)),
            placement => (config.clone(), placement),
        };
        let configs: Vec<_> = self.configs.iter().map(placed).collect();
        let mut subject =
            ShardedSubject::new(&configs, communicator, self.merge_blocks, self.row_type, &POOLS[rank % 2]);
        subject
            .bind(binding_of(configs.iter().map(|(config, _)| config), OWNER, self.update, UpdateMode::Local))
            .unwrap();
        if let Some(path) = self.load {
            restore(&mut subject.group, path, LoadMode::Replace, 1).unwrap();
        }
        let (mut seen, mut waiting) = (Seen::default(), Vec::new());
        for (number, step) in (self.first..).zip(self.steps) {
            self.run_step(&mut subject, number, step, &mut waiting, &mut seen);
        }
        if let Some(path) = self.dump {
            save(&mut subject.group, path, true, 1).unwrap();
        }
        seen.tables = (0..configs.len()).map(|table| scan(subject.table(table), 100)).collect();
        seen
    }

    /// `waiting`: the pushes that the next commit names, and their weights.
    fn run_step(
        &self,
        subject: &mut ShardedSubject,
        number: u64,
        step: &GlobalStep,
        waiting: &mut Vec<(u64, f32)>,
        seen: &mut Seen,
    ) {
        let (rank, world_size) =
            (subject.group.communicator().rank(), subject.group.communicator().world_size());
        let share_of = |input: &Input| share(input.bags().len(), rank, world_size, self.is_even);
        let bags: Vec<_> = step.inputs.iter().map(share_of).collect();
        let inputs: Vec<Input> =
            step.inputs.iter().zip(&bags).map(|(input, bags)| part_of(input, bags.clone())).collect();
        let saves = step.then != Then::Nothing;
        let (lookup, outputs) = subject.lookup(&inputs, step.insertion, saves).unwrap();
        seen.outputs.push(outputs);
        if saves {
            let gradients = step.inputs.iter().zip(&bags).zip(&step.gradients);
            let gradients = gradients.map(|((input, bags), gradients)| {
                let dim = self.configs[input.table].0.dim;
                gradients[bags.start * dim..bags.end * dim].to_vec()
            });
            let kept = Arc::new(gradients.collect::<Vec<_>>());
            let weighted = inputs.iter().filter(|input| input.weights.is_some());
            let ids: Vec<usize> = weighted.map(|input| input.ids.keys().len()).collect();
            subject.push(number, lookup, &kept, number.is_multiple_of(2), &ids).unwrap();
            waiting.push((number, step.weight));
        }
        if step.then == Then::Commit {
            seen.norms.push(subject.commit(waiting, step.is_update).unwrap().to_bits());
            waiting.clear();
            let scalars = UpdateScalars { learning_rate: 0.1, step: number, factor: 1.0 };
            subject.apply(scalars, step.is_update).unwrap();
        }
        for table in 0..self.configs.len() {
            subject.table_mut(table).erase(&step.erased).unwrap();
        }
    }

    /// Runs the program on all ranks of a world. Checks that each has what its place among them says.
    pub fn run(&self, world: Vec<Arc<dyn Communicator>>) -> Seen {
        let world_size = world.len();
        let seen: Vec<Seen> = std::thread::scope(|scope| {
            let ranks: Vec<_> =
                world.into_iter().map(|rank| scope.spawn(move || self.run_rank(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        let mut all = Seen { norms: seen[0].norms.clone(), ..Seen::default() };
        for step in 0..self.steps.len() {
            let features = 0..self.steps[step].inputs.len();
            let joined =
                features.map(|f| seen.iter().flat_map(|rank| rank.outputs[step][f].clone()).collect());
            all.outputs.push(joined.collect());
        }
        for (table, (_, placement)) in self.configs.iter().enumerate() {
            let mut joined = BTreeMap::new();
            for (rank, seen) in seen.iter().enumerate() {
                assert_eq!(seen.norms, all.norms, "norms of rank {rank}");
                match placement {
                    Placement::Replicated => {
                        assert!(rank == 0 || seen.tables[table] == joined, "replica of rank {rank}")
                    }
                    Placement::Localized(home) => {
                        assert!(rank == *home % world_size || seen.tables[table].is_empty())
                    }
                    Placement::Distributed => {}
                }
                joined.extend(seen.tables[table].clone());
            }
            all.tables.push(joined);
        }
        all
    }
}

pub fn thread_world(world_size: usize) -> Vec<Arc<dyn Communicator>> {
    ThreadRank::world(world_size, TIMEOUT)
        .into_iter()
        .map(|rank| Arc::new(rank) as Arc<dyn Communicator>)
        .collect()
}

/// An address of this host where nobody listens, of a port that the system gives to no client.
pub fn free_address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        // Other processes start elsewhere.
        let number = std::process::id().wrapping_mul(7919).wrapping_add(NEXT.fetch_add(1, Relaxed));
        let address = format!("127.0.0.1:{}", 10_000 + number % 20_000);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

pub fn tcp_world(world_size: usize) -> Vec<Arc<dyn Communicator>> {
    let address = free_address();
    let connect = |rank| TcpRank::connect(rank, world_size, &address, TIMEOUT).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size).map(|rank| scope.spawn(move || connect(rank))).collect();
        let ranks = ranks.into_iter().map(|rank| rank.join().unwrap());
        ranks.map(|rank| Arc::new(rank) as Arc<dyn Communicator>).collect()
    })
}
