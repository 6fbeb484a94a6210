//! The model of a group: lookup, push, commit and apply in words that are easy to believe.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use sok_core::contract::binding::UpdateMode;
use sok_core::contract::table::{Insertion, OutOfVocabulary, Outcomes, TableConfig};
use sok_core::error::Result;
use sok_core::formula::update::{Update, UpdateScalars};
use sok_core::key::Key;
use sok_core::math::sum_of_squares;

use super::input::Input;
use super::subject::{OWN_UPDATE, own_scalars, was_restored};
use super::table::{BEFORE_FIRST_COMMIT, ModelTable, add, merge};

/// An id that gives its key a gradient.
struct Term {
    /// The key, and which of its lives.
    life: (Key, u64),
    feature: usize,
    bag: usize,
    coefficient: f32,
}

/// The birth of a row that a commit is to make; those of rows that are there begin at 1.
const UNBORN: u64 = 0;

/// Keys of a table that a lookup did not find, and that a commit is to insert.
#[derive(Default)]
struct Absent {
    /// In the order in which they come, one an id.
    keys: Vec<Key>,
    /// How often all records of the table had gone at once.
    clears: u64,
    /// What the commit gave them: their birth, or nothing.
    births: RefCell<Option<BTreeMap<Key, Option<u64>>>>,
}

impl Absent {
    /// The birth of a life of a lookup, if it had a row or has got one.
    fn birth(&self, (key, birth): (Key, u64)) -> Option<u64> {
        match birth {
            UNBORN => self.births.borrow().as_ref().and_then(|births| births[&key]),
            birth => Some(birth),
        }
    }
}

/// How many ids used each life of a key, by table, in a lookup that a commit counts once.
#[derive(Default)]
struct Uses {
    ids: Vec<BTreeMap<(Key, u64), u64>>,
    /// By table: the highest score that came with each key.
    scores: Vec<BTreeMap<Key, u64>>,
    is_counted: Cell<bool>,
    /// Whether gradients may still come, or wait for a commit.
    is_open: Cell<bool>,
}

/// What a lookup is remembered by.
pub struct Looked {
    pub number: u64,
    pub inputs: Vec<Input>,
    /// By table, in the order (feature, position).
    terms: Vec<Vec<Term>>,
    /// By table.
    absent: Rc<Vec<Absent>>,
    uses: Rc<Uses>,
    /// By feature and position: which life the key lived, `clears` of the table and birth of the row.
    lives: Vec<Vec<(u64, Option<u64>)>>,
}

/// By table: a gradient for each life of a key.
type Gradients = Vec<BTreeMap<(Key, u64), Vec<f32>>>;

pub struct Push {
    pub number: u64,
    lookup: u64,
    absent: Rc<Vec<Absent>>,
    uses: Rc<Uses>,
    gradients: Gradients,
}

pub struct Model {
    pub tables: Vec<ModelTable>,
    pub lookups: Vec<Looked>,
    pub pushes: Vec<Push>,
    pub update: Option<Update>,
    pub mode: UpdateMode,
    pub outcomes: Vec<Outcomes>,
    pub dropped: Vec<u64>,
    pub unknown: Vec<u64>,
    next_lookup: u64,
    next_push: u64,
    committed: Gradients,
    num_commits: u64,
    owner: u64,
}

impl Model {
    pub fn new(configs: &[TableConfig]) -> Model {
        Model {
            tables: configs.iter().cloned().map(ModelTable::new).collect(),
            lookups: Vec::new(),
            pushes: Vec::new(),
            update: None,
            mode: UpdateMode::Local,
            outcomes: vec![Outcomes::default(); configs.len()],
            dropped: vec![0; configs.len()],
            unknown: vec![0; configs.len()],
            next_lookup: 1,
            next_push: 1,
            committed: vec![BTreeMap::new(); configs.len()],
            num_commits: BEFORE_FIRST_COMMIT,
            owner: 0,
        }
    }

    /// Binds an optimizer. The bound optimizer keeps its states. The first optimizer keeps loaded states. A restored optimizer keeps the
    /// loaded states of tables that no optimizer has updated since the load. All other states start anew.
    pub fn bind(&mut self, owner: u64, update: Update, mode: UpdateMode) {
        self.mode = mode;
        let keep = self.update.is_none() || owner == self.owner;
        for table in &mut self.tables {
            let keep = keep || (was_restored(owner) && table.has_loaded_states);
            table.set_update_rule(Some(update_of(&table.config, update)), keep);
        }
        (self.owner, self.update) = (owner, Some(update));
    }

    /// Tells each table which of its rows lookups use whose gradients were not committed yet.
    pub fn find_rows_in_progress(&mut self) {
        let of_lookups = self.lookups.iter().map(|looked| (&looked.uses, &looked.absent));
        let of_pushes = self.pushes.iter().map(|push| (&push.uses, &push.absent));
        let open = of_lookups.chain(of_pushes).filter(|(uses, _)| uses.is_open.get());
        self.tables.iter_mut().for_each(|table| table.in_progress.clear());
        for (uses, absent) in open {
            for ((table, ids), absent) in self.tables.iter_mut().zip(&uses.ids).zip(absent.iter()) {
                for &life in ids.keys().filter(|_| absent.clears == table.clears) {
                    if absent.birth(life).is_some_and(|birth| table.birth(life.0) == Some(birth)) {
                        table.in_progress.insert(life.0);
                    }
                }
            }
        }
    }

    /// Rows of each feature. With `save` the lookup is remembered.
    pub fn lookup(&mut self, inputs: &[Input], insertion: Insertion, save: bool) -> Result<Vec<Vec<f32>>> {
        let looked = self.look_up(inputs, insertion, save);
        looked.inspect_err(|_| {
            if insertion != Insertion::Never {
                self.abandon_steps();
            }
        })
    }

    /// Rows of lookups may go once a call has failed.
    fn abandon_steps(&self) {
        self.lookups.iter().for_each(|looked| looked.uses.is_open.set(false));
        self.pushes.iter().for_each(|push| push.uses.is_open.set(false));
    }

    fn look_up(&mut self, inputs: &[Input], insertion: Insertion, save: bool) -> Result<Vec<Vec<f32>>> {
        self.find_rows_in_progress();
        for input in inputs {
            let table = &self.tables[input.table];
            let keys: Vec<Key> =
                input.ids.keys().into_iter().filter(|k| input.padding_key != Some(*k)).collect();
            if table.config.out_of_vocabulary == OutOfVocabulary::Raise {
                table.outside_error(Some(&input.name), &keys)?;
            }
        }
        let insertion_of = |table: &ModelTable| match insertion {
            Insertion::AtLookup if table.config.admission.is_some() && save => Insertion::AtCommit,
            Insertion::AtLookup if table.config.admission.is_some() => Insertion::Never,
            insertion => insertion,
        };
        let insertions: Vec<Insertion> = self.tables.iter().map(insertion_of).collect();
        let active: Vec<Vec<Key>> = (0..self.tables.len()).map(|t| self.active_keys(inputs, t)).collect();
        for ((table, keys), insertion) in self.tables.iter().zip(&active).zip(&insertions) {
            if *insertion == Insertion::AtLookup {
                table.full_error(&table.absent(keys), keys)?;
            }
        }
        for (number, keys) in active.iter().enumerate() {
            let insertion = insertions[number];
            let outcomes = self.insert_or_find(number, keys, insertion == Insertion::AtLookup);
            let hit = if save { outcomes.hit } else { 0 };
            self.outcomes[number] += Outcomes { hit, ..outcomes };
            if insertion == Insertion::Never || (insertion == Insertion::AtCommit && !save) {
                self.unknown[number] +=
                    keys.iter().filter(|key| !self.tables[number].rows.contains_key(key)).count() as u64;
            }
        }
        if save {
            let at_commit = |insertion: &Insertion| *insertion == Insertion::AtCommit;
            let at_commit: Vec<bool> = insertions.iter().map(at_commit).collect();
            self.remember(inputs, &at_commit, insertion != Insertion::Never);
        }
        for (table, keys) in self.tables.iter_mut().zip(&active) {
            if !save && table.config.eviction.is_some_and(|policy| policy.counts_inference) {
                table.count_uses(keys);
            }
        }
        for number in 0..self.tables.len() {
            let policy = self.tables[number].config.eviction;
            if !save && policy.is_some_and(|policy| policy.counts_inference) {
                let scores = self.scores(inputs, number);
                self.tables[number].give_scores(&scores);
            }
        }
        Ok(inputs.iter().map(|input| self.pool(input)).collect())
    }

    fn insert_or_find(&mut self, table: usize, keys: &[Key], insert: bool) -> Outcomes {
        let table = &mut self.tables[table];
        if insert {
            return table.insert(keys);
        }
        let there: BTreeSet<&Key> = keys.iter().filter(|k| table.rows.contains_key(k)).collect();
        Outcomes { hit: there.len() as u64, ..Outcomes::default() }
    }

    /// An id that may insert and gets a gradient.
    fn is_active(&self, input: &Input, key: Key, position: usize) -> bool {
        input.padding_key != Some(key)
            && !self.tables[input.table].is_outside(key)
            && input.weight(position) != 0.0
    }

    fn active_keys(&self, inputs: &[Input], table: usize) -> Vec<Key> {
        let of_table = inputs.iter().filter(|input| input.table == table);
        let active = |input: &Input| {
            let keys = input.ids.keys();
            let active = |p: &usize| self.is_active(input, keys[*p], *p);
            (0..keys.len()).filter(active).map(|p| keys[p]).collect::<Vec<_>>()
        };
        of_table.flat_map(active).collect()
    }

    fn pool(&self, input: &Input) -> Vec<f32> {
        let table = &self.tables[input.table];
        let keys = input.ids.keys();
        let mut rows = Vec::new();
        for bag in input.bags() {
            let positions: Vec<usize> =
                input.there(&keys, &bag).filter(|p| input.weight(*p) != 0.0).collect();
            let mut sum = vec![0.0; table.config.dim];
            for (nth, &position) in positions.iter().enumerate() {
                let weight = input.weight(position);
                let row: Vec<f32> = table.answer(keys[position]).iter().map(|x| weight * x).collect();
                if nth == 0 { sum = row } else { add(&mut sum, &row) }
            }
            let weights: Vec<f32> = positions.iter().map(|p| input.weight(*p)).collect();
            let scale = input.scale(&weights);
            rows.extend(sum.iter().map(|s| s * scale));
        }
        rows
    }

    /// `is_open`: whether the rows stay until their gradients have come.
    fn remember(&mut self, inputs: &[Input], at_commit: &[bool], is_open: bool) {
        let mut terms: Vec<Vec<Term>> = self.tables.iter().map(|_| Vec::new()).collect();
        let mut lives = Vec::new();
        let mut absent: Vec<Absent> =
            self.tables.iter().map(|t| Absent { clears: t.clears, ..Absent::default() }).collect();
        for (feature, input) in inputs.iter().enumerate() {
            let (keys, at_commit) = (input.ids.keys(), at_commit[input.table]);
            lives.push(keys.iter().map(|k| self.tables[input.table].life(*k)).collect());
            for (bag, positions) in input.bags().into_iter().enumerate() {
                let weights: Vec<f32> = input.there(&keys, &positions).map(|p| input.weight(p)).collect();
                let scale = input.scale(&weights);
                for p in positions {
                    if !self.is_active(input, keys[p], p) {
                        continue;
                    }
                    let birth = self.tables[input.table].birth(keys[p]);
                    if birth.is_none() && at_commit {
                        absent[input.table].keys.push(keys[p]);
                    }
                    match birth.or(at_commit.then_some(UNBORN)) {
                        None => self.dropped[input.table] += 1,
                        Some(birth) => terms[input.table].push(Term {
                            life: (keys[p], birth),
                            feature,
                            bag,
                            coefficient: input.weight(p) * scale,
                        }),
                    }
                }
            }
        }
        let mut ids: Vec<BTreeMap<(Key, u64), u64>> = self.tables.iter().map(|_| BTreeMap::new()).collect();
        for (ids, terms) in ids.iter_mut().zip(&terms) {
            terms.iter().for_each(|term| *ids.entry(term.life).or_default() += 1);
        }
        let number = self.next_lookup;
        let scores = (0..self.tables.len()).map(|table| self.scores(inputs, table)).collect();
        let uses = Rc::new(Uses { ids, scores, is_counted: Cell::new(false), is_open: Cell::new(is_open) });
        let (inputs, absent) = (inputs.to_vec(), Rc::new(absent));
        self.lookups.push(Looked { number, inputs, terms, absent, uses, lives });
        self.next_lookup += 1;
        if self.lookups.len() > 64 {
            self.lookups.remove(0);
        }
    }

    /// `gradients`: of each feature's rows. Gives the number of the push.
    pub fn push(&mut self, lookup: usize, gradients: &[Vec<f32>]) -> u64 {
        let looked = &self.lookups[lookup];
        let mut merged = Gradients::new();
        for (table, terms) in self.tables.iter().zip(&looked.terms) {
            let dim = table.config.dim;
            let mut of_key: BTreeMap<(Key, u64), Vec<Vec<f32>>> = BTreeMap::new();
            for term in terms {
                let row = &gradients[term.feature][term.bag * dim..][..dim];
                of_key.entry(term.life).or_default().push(row.iter().map(|g| g * term.coefficient).collect());
            }
            merged.push(of_key.into_iter().map(|(life, terms)| (life, merge(&terms))).collect());
        }
        let number = self.next_push;
        self.next_push += 1;
        let (lookup, absent, uses) = (looked.number, looked.absent.clone(), looked.uses.clone());
        self.pushes.push(Push { number, lookup, absent, uses, gradients: merged });
        if self.pushes.len() > 64 || self.pushes[0].number + 64 <= number {
            self.pushes.remove(0);
        }
        number
    }

    /// What table `number` has yet to insert for the named pushes.
    fn absent(&self, named: &[(u64, f32)], number: usize) -> Vec<Rc<Vec<Absent>>> {
        let pushes = named.iter().flat_map(|(n, _)| self.pushes.iter().filter(move |p| p.number == *n));
        let absent = pushes.map(|push| push.absent.clone());
        absent
            .filter(|a| a[number].births.borrow().is_none() && a[number].clears == self.tables[number].clears)
            .collect()
    }

    /// Makes the rows that the named pushes missed, as far as there is room.
    fn insert_absent(&mut self, named: &[(u64, f32)]) -> Result<()> {
        for (number, table) in self.tables.iter().enumerate() {
            let absent = self.absent(named, number);
            let keys: Vec<Key> = absent.iter().flat_map(|a| a[number].keys.clone()).collect();
            table.full_error(&table.admitted(&keys, &table.sights_after(&absent, number)), &keys)?;
        }
        for number in 0..self.tables.len() {
            let absent = self.absent(named, number);
            let keys: Vec<Key> = absent.iter().flat_map(|a| a[number].keys.clone()).collect();
            let sights = self.tables[number].sights_after(&absent, number);
            self.tables[number].sights = sights.clone();
            let num_new = self.tables[number].admitted(&keys, &sights).len();
            let evicted = self.tables[number].evict(num_new, &keys);
            self.outcomes[number] += Outcomes { evicted, ..Outcomes::default() };
            for absent in self.absent(named, number) {
                let (absent, table) = (&absent[number], &mut self.tables[number]);
                if absent.births.borrow().is_some() {
                    continue; // named twice
                }
                let new = table.admitted(&absent.keys, &sights);
                let filtered = (table.absent(&absent.keys).len() - new.len()) as u64;
                let Outcomes { inserted, refused, .. } = table.insert_fitting(&new);
                self.outcomes[number] += Outcomes { inserted, refused, filtered, ..Outcomes::default() };
                let births: BTreeMap<_, _> = absent.keys.iter().map(|k| (*k, table.birth(*k))).collect();
                self.dropped[number] += absent.keys.iter().filter(|k| births[k].is_none()).count() as u64;
                *absent.births.borrow_mut() = Some(births);
            }
        }
        Ok(())
    }

    /// Takes the named pushes, makes the rows that they missed, and drops what is older than the oldest of them.
    pub fn commit(&mut self, named: &[(u64, f32)]) -> Result<()> {
        self.find_rows_in_progress();
        let Some(&(oldest, _)) = named.first() else {
            self.num_commits += 1;
            self.pushes.iter().for_each(|push| push.uses.is_open.set(true));
            self.end_step();
            return Ok(());
        };
        self.insert_absent(named).inspect_err(|_| self.abandon_steps())?;
        self.num_commits += 1;
        self.pushes.retain(|push| push.number >= oldest);
        let mut oldest_lookup = u64::MAX;
        let mut given = vec![BTreeMap::new(); self.tables.len()];
        for &(number, weight) in named {
            let at = self.pushes.iter().position(|push| push.number == number).unwrap();
            let push = self.pushes.remove(at);
            oldest_lookup = oldest_lookup.min(push.lookup);
            self.count_uses(&push, &mut given);
            let of_tables = self.committed.iter_mut().zip(push.gradients).zip(push.absent.iter());
            for ((sums, gradients), absent) in of_tables {
                let born = |life: (Key, u64)| absent.birth(life).map(|birth| (life.0, birth));
                let gradients = gradients.into_iter().filter_map(|(life, g)| Some((born(life)?, g)));
                for (life, gradient) in gradients {
                    let weighted: Vec<f32> = gradient.iter().map(|g| g * weight).collect();
                    sums.entry(life).and_modify(|sum| add(sum, &weighted)).or_insert(weighted);
                }
            }
        }
        self.tables.iter_mut().zip(&given).for_each(|(table, given)| table.give_scores(given));
        self.lookups.retain(|looked| looked.number >= oldest_lookup);
        self.pushes.iter().for_each(|push| push.uses.is_open.set(true));
        self.end_step();
        Ok(())
    }

    fn end_step(&mut self) {
        for (table, outcomes) in self.tables.iter_mut().zip(&mut self.outcomes) {
            *outcomes += Outcomes { expired: table.end_step(self.num_commits), ..Outcomes::default() };
        }
    }

    /// The highest score that comes with each key of a table.
    fn scores(&self, inputs: &[Input], table: usize) -> BTreeMap<Key, u64> {
        let mut highest = BTreeMap::new();
        for input in inputs.iter().filter(|input| input.table == table) {
            for (position, (key, score)) in
                input.ids.keys().into_iter().zip(input.scores.iter().flatten()).enumerate()
            {
                if self.is_active(input, key, position) {
                    let highest = highest.entry(key).or_default();
                    *highest = (*score).max(0).max(*highest as i64) as u64;
                }
            }
        }
        highest
    }

    /// Counts the uses of the rows of a push, once for each lookup. Adds the scores that came with it to `given`, by table.
    fn count_uses(&mut self, push: &Push, given: &mut [BTreeMap<Key, u64>]) {
        push.uses.is_open.set(false);
        let is_first = !push.uses.is_counted.replace(true);
        for ((table, ids), absent) in self.tables.iter_mut().zip(&push.uses.ids).zip(push.absent.iter()) {
            for (&(key, birth), &num_ids) in ids {
                let birth = absent.birth((key, birth));
                if absent.clears == table.clears && birth.is_some() && table.birth(key) == birth {
                    if is_first {
                        table.count_use(key, num_ids);
                    }
                    table.rows.get_mut(&key).unwrap().commit = self.num_commits;
                }
            }
        }
        for (number, scores) in push.uses.scores.iter().enumerate().filter(|_| is_first) {
            if push.absent[number].clears == self.tables[number].clears {
                let highest = &mut given[number];
                for (&key, &score) in scores {
                    highest.entry(key).and_modify(|highest| *highest = score.max(*highest)).or_insert(score);
                }
            }
        }
    }

    /// Of all that is committed to the tables of the model's optimizer.
    pub fn total_squared_norm(&self) -> f64 {
        let of_model = self.tables.iter().enumerate().filter(|(_, table)| table.config.optimizer == 0);
        of_model.map(|(number, _)| self.squared_norm(number)).sum()
    }

    /// Of all that is committed to a table.
    pub fn squared_norm(&self, table: usize) -> f64 {
        self.committed[table].values().map(|gradient| f64::from(sum_of_squares(gradient))).sum()
    }

    pub fn apply(&mut self, scalars: &UpdateScalars, is_update: bool) {
        let of_table = |table: &ModelTable| match table.config.optimizer {
            0 => *scalars,
            _ => own_scalars(*scalars),
        };
        let all: Vec<_> = self.tables.iter().map(of_table).collect();
        self.apply_each(&all, is_update);
    }

    /// With scalars of its own for each table.
    pub fn apply_each(&mut self, scalars: &[UpdateScalars], is_update: bool) {
        if !is_update {
            return;
        }
        for table in &mut self.tables {
            (table.settled_commit, table.has_loaded_states) = (self.num_commits, false);
        }
        for ((table, sums), scalars) in self.tables.iter_mut().zip(&mut self.committed).zip(scalars) {
            let update = update_of(&table.config, self.update.unwrap());
            let mut resting: BTreeSet<Key> = table.rows.keys().copied().collect();
            for ((key, birth), gradient) in std::mem::take(sums) {
                if table.birth(key) == Some(birth) {
                    table.step(key, &gradient, &update, scalars);
                    resting.remove(&key);
                }
            }
            if self.mode != UpdateMode::Local && !update.rests() {
                let zeros = vec![0.0; table.config.dim];
                resting.into_iter().for_each(|key| table.step(key, &zeros, &update, scalars));
            }
        }
    }

    /// Of each id of a feature, with what its rounding may be; `None` where a key of the bag lives another life by now.
    pub fn weight_gradients(&self, lookup: usize, feature: usize, rows: &[f32]) -> Vec<Option<(f64, f64)>> {
        let looked = &self.lookups[lookup];
        let (input, lives) = (&looked.inputs[feature], &looked.lives[feature]);
        let keys = input.ids.keys();
        let table = &self.tables[input.table];
        let mut gradients = vec![Some((0.0, 0.0)); keys.len()];
        for (bag, row) in input.bags().into_iter().zip(rows.chunks_exact(table.config.dim)) {
            if bag.clone().any(|p| table.life(keys[p]) != lives[p]) {
                bag.for_each(|p| gradients[p] = None);
                continue;
            }
            let positions: Vec<usize> = input.there(&keys, &bag).collect();
            let rows: Vec<Vec<f32>> = positions.iter().map(|p| table.answer(keys[*p])).collect();
            let weights: Vec<f64> = positions.iter().map(|p| f64::from(input.weight(*p))).collect();
            for (position, gradient) in positions.iter().zip(input.through_combiner(&rows, row, &weights)) {
                gradients[*position] = Some(gradient);
            }
        }
        gradients
    }
}

/// The update of a table of a group that is bound to an optimizer.
fn update_of(config: &TableConfig, update: Update) -> Update {
    if config.optimizer == 0 { update } else { OWN_UPDATE }
}

impl ModelTable {
    /// How often keys without a row have come, after these lookups too.
    fn sights_after(&self, lookups: &[Rc<Vec<Absent>>], number: usize) -> BTreeMap<Key, u32> {
        let mut sights = self.sights.clone();
        let Some(policy) = self.config.admission.filter(|policy| policy.counts()) else { return sights };
        let (mut seen, mut counted) = (BTreeSet::new(), Vec::new());
        for absent in lookups {
            if counted.iter().any(|other| Rc::ptr_eq(other, absent)) {
                continue; // named twice
            }
            counted.push(absent.clone());
            for &key in absent[number].keys.iter().filter(|key| self.birth(**key).is_none()) {
                if policy.counts_ids() || seen.insert(key) {
                    *sights.entry(key).or_default() += 1;
                }
            }
        }
        sights
    }

    /// Keys without a row that get one, each once.
    fn admitted(&self, keys: &[Key], sights: &BTreeMap<Key, u32>) -> Vec<Key> {
        let count = |key: &Key| sights.get(key).copied().unwrap_or(0);
        self.absent(keys).into_iter().filter(|key| self.admits(*key, count(key))).collect()
    }
}
