//! A lookup of all ranks.

#![allow(unsafe_code)]

use sok_core::contract::batch::Combiner;
use sok_core::contract::table::Insertion;
use sok_core::error::{Error, Result};
use sok_core::exchange::collectives::{agree, gather};
use sok_core::exchange::message::{Call, Reader, Tag, Writer};
use sok_core::host::sharded::LookupMode;
use sok_core::row_type::RowType;

use super::asked::{TableRequest, read_bags, requests_of, write_bags};
use super::at_owner::FirstKeys;
use super::layout::{LookupLayout, PooledAddresses, row_bytes, start_of};
use super::request::RankRequest;
use super::transfers::Places;
use super::{Served, ShardedGpuGroup, rows_of_board};
use crate::abi::{Flag, MAX_RANKS, SharedRows};
use crate::device::Stream;
use crate::gpu_group::SavedLookup;
use crate::gpu_group::lookup::OfRanks;
use crate::gpu_table::GpuTable;
use crate::memory::{Buffer, read};
use crate::peers::{Window, WindowName};
use crate::step::{
    Bags, Feature, Ids, KeyType, LookupOptions, Remote, RowSource, ScoreType, Scores, Started, When,
};

/// This rank's side of a lookup that is under way.
struct Asked<'a> {
    /// The features, of which those are marked that the owners of their tables pool.
    features: Vec<Feature<'a>>,
    requests: Vec<TableRequest>,
    layout: LookupLayout,
    started: Started,
    window: Window,
}

/// Maximum number of small buffers that are kept for later lookups.
const SPARE_BEGINS: usize = 4;

/// The features that this rank serves.
struct Serving {
    features: Vec<Feature<'static>>,
    served: Served,
    remote: Option<Remote>,
}

impl ShardedGpuGroup {
    /// Enqueues the lookup of all features of a layer's call, as `GpuGroup::lookup`. All ranks must call it.
    ///
    /// # Errors
    /// The same, and [`Error::Rank`].
    ///
    /// # Safety
    /// The same.
    pub unsafe fn lookup(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        stream: Stream,
    ) -> Result<u64> {
        // SAFETY: The caller guarantees it.
        let looked = unsafe { self.look_up(features, insertion, save, number_to, stream) };
        looked.inspect_err(|_| self.shard.abandon_steps_after(insertion))
    }

    /// Does the work of `lookup`.
    ///
    /// # Safety
    /// As `lookup`.
    unsafe fn look_up(
        &mut self,
        features: &[Feature],
        insertion: Insertion,
        save: bool,
        number_to: Option<u64>,
        stream: Stream,
    ) -> Result<u64> {
        // The others are told of an error by the exchange.
        let checked = self.check();
        self.num_lookups += 1;
        let tag = self.tag(Call::Lookup, self.num_lookups);
        let mode = LookupMode { insertion, save };
        // The gradients of weights need the rows of ids of weight 0, too.
        let asks_silent = save && features.iter().any(|feature| feature.weights.is_some());
        self.follow_generations();
        let asked = checked.and_then(|()| self.ask(features, (save, asks_silent), number_to, stream));
        let header = match &asked {
            Ok(asked) => self.write_header(mode, asked, asks_silent),
            Err(error) => Err(error.clone()),
        };
        let headers = match gather(&*self.peers.communicator, tag, header) {
            Ok(headers) => headers,
            Err(error) => {
                self.front.reuse_window(asked.ok().map(|asked| asked.window));
                return Err(error);
            }
        };
        let asked = asked?;
        let requests = self.read_headers(mode, &headers, &asked.window);
        let mut requests = self.fatal(requests)?;
        let number = match self.serve(&mut requests, mode, tag, stream) {
            Ok(number) => number,
            Err(error) => {
                self.front.reuse_window(Some(asked.window));
                return Err(error);
            }
        };
        self.front.windows.as_mut().expect("a front has windows").end_rest();
        let answered = self.pool(asked, stream);
        let answered = self.fatal(answered)?;
        // What fails there is not needed: the later lookup does all by itself.
        drop(self.begin_ahead());
        debug_assert!(!save || answered == number, "front and shard count the same lookups");
        if save {
            number_to.map(|to| self.front.by_address.insert(to, answered));
        }
        Ok(answered)
    }

    /// Enqueues making the ids of this rank distinct.
    fn ask<'a>(
        &mut self,
        features: &[Feature<'a>],
        (save, asks_silent): (bool, bool),
        number_to: Option<u64>,
        stream: Stream,
    ) -> Result<Asked<'a>> {
        for feature in features {
            feature.validate()?;
            if feature.table >= self.owners.len() {
                return Err(Error::argument("no such table in the group"));
            }
            feature.check_scores(&self.shard.tables[feature.table].config)?;
        }
        let world_size = self.peers.world_size();
        self.front.workspace.enter(stream)?;
        let ahead = self.take_ahead(features, save, stream)?;
        let mut features = features.to_vec();
        match &ahead {
            Some(ahead) => features.iter_mut().for_each(|f| f.at_owner = ahead.at_owner[f.table]),
            None => self.choose_at_owner(&mut features, save),
        }
        let requests = requests_of(self.owners.len(), &features);
        let layout = LookupLayout::new(&self.shard.tables, &requests, world_size);
        let (window, asking) = match ahead {
            Some(ahead) => (ahead.window, Some(ahead.asking)),
            None => {
                let windows = self.front.windows.as_mut().expect("a front has windows");
                let mut window = windows.take(layout.bytes)?;
                self.peers.send(&mut [&mut window])?;
                (window, None)
            }
        };
        let (to, rows) = layout.addresses(window.address(), self.distinct.address(), world_size);
        let front = &mut self.front;
        let inserts = vec![true; front.tables.len()];
        let number = number_to.map(|to| (to, if save { front.next_lookup } else { 0 }));
        let options =
            LookupOptions { inserts: &inserts, absent: &[], save, number, rows: RowSource::Ranks(&rows) };
        let mut started = front.workspace.start(&mut front.tables, &features, options, stream)?;
        let splits_to = ShardedGpuGroup::splits_to(&features, &layout, window.address());
        front.workspace.share_splits(&started, &splits_to, stream)?;
        front.workspace.keep_scores(&started, None, stream)?;
        let (workspace, owners) = (&front.workspace, &self.owners);
        match asking {
            None => {
                workspace.ask(&mut self.asking, &mut started, owners, &to, asks_silent, When::Now, stream)?;
            }
            Some(mut asking) => {
                workspace.ask(&mut asking, &mut started, owners, &to, false, When::IfOthers, stream)?;
                self.reuse_asking(asking);
            }
        }
        self.front.workspace.sort_ids(&started, stream)?;
        Ok(Asked { features, requests, layout, started, window })
    }

    fn write_header(&mut self, mode: LookupMode, asked: &Asked, asks_silent: bool) -> Result<Vec<u8>> {
        let mut writer = Writer::default();
        writer.numbers(&[self.tables, mode.code(), self.shard.next_lookup, asks_silent.into()])?;
        for ((table, owners), request) in self.shard.tables.iter().zip(&self.owners).zip(&asked.requests) {
            let room = if owners.is_elsewhere() { u64::MAX } else { table.room_left() };
            writer.numbers(&[request.num_ids as u64, room])?;
            write_bags(&request.bags, &mut writer)?;
        }
        asked.window.name().write(&mut writer)?;
        self.peers.write_freed(&mut writer)?;
        Ok(writer.finish())
    }

    fn read_headers(&self, mode: LookupMode, headers: &[Vec<u8>], own: &Window) -> Result<Vec<RankRequest>> {
        let read = |(rank, header): (usize, &Vec<u8>)| {
            let mut reader = Reader::new(header, rank);
            if reader.number()? != self.tables {
                return self.differs(rank, "looks up in a layer whose tables differ from this rank's");
            }
            if reader.number()? != mode.code() {
                return self.differs(
                    rank,
                    "looks up with another `training` or another gradient tape than this rank",
                );
            }
            if reader.number()? != self.shard.next_lookup {
                return self.differs(rank, "has saved other lookups than this rank");
            }
            let asks_silent = reader.number()? != 0;
            let (mut tables, mut room) = (Vec::new(), Vec::new());
            for _ in 0..self.owners.len() {
                let num_ids = reader.number()? as usize;
                room.push(reader.number()?);
                tables.push(TableRequest { num_ids, bags: read_bags(num_ids, rank, &mut reader)? });
            }
            let name = WindowName::read(&mut reader)?;
            self.peers.read_freed(rank, &mut reader)?;
            reader.finish()?;
            let window = self.peers.memory_of(rank, name, Some(own))?;
            let layout = LookupLayout::new(&self.shard.tables, &tables, self.peers.world_size());
            let base = window.as_ref().map_or(0, |window| window.address());
            let place = |table: usize| Places {
                keys: base + layout.keys[table] as u64,
                rows: base + layout.rows[table] as u64,
                id_counts: layout.id_counts[table].map_or(0, |place| base + place as u64),
                scores: layout.scores[table].map_or(0, |place| base + place as u64),
            };
            let places = (0..tables.len()).map(place).collect();
            let pooled = layout.pooled.iter().map(|places| PooledAddresses::of(places, base)).collect();
            Ok(RankRequest { tables, places, pooled, window, room, asks_silent })
        };
        headers.iter().enumerate().map(read).collect()
    }

    /// Looks up what all ranks ask for, and gives them the rows. Returns the number of the shard's lookup.
    fn serve(
        &mut self,
        requests: &mut [RankRequest],
        mode: LookupMode,
        tag: Tag,
        stream: Stream,
    ) -> Result<u64> {
        self.check_size(requests)?;
        // A table that may refuse keys needs them in order on the host.
        let may_refuse = |table: usize| {
            let ids: u64 = requests.iter().map(|request| request.tables[table].num_ids as u64).sum();
            requests.iter().any(|request| ids > request.room[table])
        };
        let inserts_now = |table: usize| {
            self.shard.tables[table].own_insertion(mode.insertion, mode.save) == Insertion::AtLookup
        };
        // Uses are counted of the keys that come, and the device counts those only of lookups that are saved.
        let counts_uses = |table: &GpuTable| {
            !mode.save && table.config.eviction.is_some_and(|policy| policy.counts_inference)
        };
        let must_agree = (0..self.owners.len()).any(|table| inserts_now(table) && may_refuse(table))
            || self.shard.tables.iter().any(counts_uses);
        let peers = self.peers.clone();
        let starts = match peers.nccl() {
            Some(nccl) => {
                let own = requests[peers.rank()].window.as_ref().map_or(0, |window| window.address());
                let shared = self.share_out_of_vocabulary(stream);
                shared.and_then(|()| self.gather_starts(nccl, own, stream)).map(Some)
            }
            None if must_agree => self.wait_for_starts(requests, stream).map(Some),
            None => Ok(None),
        };
        let starts = self.fatal(starts)?;
        let received = match peers.nccl() {
            None => None,
            Some(nccl) => {
                let received =
                    self.receive_keys(nccl, requests, starts.as_deref().unwrap_or_default(), stream);
                let received = self.fatal(received)?;
                for (request, places) in requests.iter_mut().zip(&received.places) {
                    if request.window.is_none() {
                        request.places.clone_from(places);
                    }
                }
                Some((nccl, received))
            }
        };
        let serving = self.serving(requests, starts.as_deref(), stream);
        let Serving { features, mut served, remote } = self.fatal(serving)?;
        let LookupMode { insertion, save } = mode;
        let mut agreed = None;
        let mut vote = || agreed.insert(agree(&*peers.communicator, tag.at(1), Ok(()))).clone();
        let vote: Option<&mut dyn FnMut() -> Result<()>> = if must_agree { Some(&mut vote) } else { None };
        let of_ranks = OfRanks { remote: remote.as_ref(), vote };
        // SAFETY: The addresses are of windows, which live until their ranks have seen all flags of this call, or of received keys.
        let looked_up = unsafe { self.shard.look_up(&features, insertion, save, None, of_ranks, stream) };
        let looked_up = match (looked_up, agreed) {
            // This rank tells the others of its error.
            (Err(error), None) if must_agree => agree(&*peers.communicator, tag.at(1), Err(error)),
            (Err(error), Some(Err(_))) => Err(error),
            (looked_up, _) => Ok(self.fatal(looked_up)?),
        };
        if looked_up.is_ok() {
            let first_keys = match remote {
                Some(remote) => FirstKeys::OnDevice(remote.firsts),
                None => FirstKeys::Known(self.shard.workspace.first_ids(&self.shard.tables, &features)?),
            };
            // The features of ids of weight 0 come last.
            let num_others = features.iter().filter(|feature| !feature.is_silent).count();
            let others = &served.features[..num_others];
            let pooled = self.pool_for_ranks(requests, others, &first_keys, save, stream);
            served.pooled = self.fatal(pooled)?;
        }
        // Also if the lookup was refused, other ranks may have work under way that uses this rank's windows.
        let returned = match received {
            Some((nccl, received)) => {
                self.return_rows(nccl, requests, starts.as_deref().unwrap_or_default(), received, stream)
            }
            None => self.shard.workspace.meet(&self.on_device, Flag::Rows, self.num_lookups, stream),
        };
        self.fatal(returned)?;
        let number = looked_up?;
        if save {
            self.forget_served();
            self.served.push_back(Served { number, starts: starts.unwrap_or_default(), ..served });
        } else {
            self.spare_begins.push(served.begins_on_device);
        }
        Ok(number)
    }

    /// Drops the lookups that were served and to which no gradients may come any more. Later ones use their memory.
    fn forget_served(&mut self) {
        let pushed = self.front.ring.iter().map(|push| push.lookup.number);
        let saved = self.front.lookups.iter().map(|lookup| lookup.number);
        let oldest = pushed.chain(saved).min().unwrap_or(u64::MAX);
        while self.served.front().is_some_and(|served| served.number < oldest) {
            let Some(Served { begins_on_device, pooled, .. }) = self.served.pop_front() else { return };
            self.spare_begins.push(begins_on_device);
            if let (Some(pooling), Some(pooled)) = (&mut self.pooling, pooled) {
                pooling.give_back(pooled.into_memory());
            }
        }
    }

    /// Checks that the keys of all ranks are not too many for one call. All ranks find the same.
    fn check_size(&self, requests: &[RankRequest]) -> Result<()> {
        let num_features = 2 * (self.owners.len() * requests.len()) as u64;
        let tables = || requests.iter().flat_map(|request| &request.tables);
        let num_ids = || tables().map(|table| table.num_ids as u64);
        let (largest, all) = (num_ids().max().unwrap_or(0), 2 * num_ids().sum::<u64>());
        let shift = u64::BITS - largest.leading_zeros();
        let bags = || tables().flat_map(|table| &table.bags);
        let bag_shift =
            bags().map(|bags| u64::BITS - (bags.num_bags as u64).leading_zeros()).max().unwrap_or(0);
        let fits = |features: u64, shift: u32| features << shift <= 1 << 32;
        if all <= u64::from(u32::MAX / 4)
            && fits(num_features, shift)
            && fits(bags().count() as u64, bag_shift)
        {
            return Ok(());
        }
        Err(Error::argument(format!(
            "{} tables of {} ranks with up to {largest} ids each are too many for one call on GPUs. Use smaller batches, or several layers",
            self.owners.len(),
            requests.len()
        )))
    }

    /// Waits for the keys of all ranks. Returns, by rank, where the keys of each table and owner start.
    fn wait_for_starts(&mut self, requests: &[RankRequest], stream: Stream) -> Result<Vec<Vec<u32>>> {
        self.share_out_of_vocabulary(stream)?;
        self.shard.workspace.meet(&self.on_device, Flag::Keys, self.num_lookups, stream)?;
        stream.synchronize()?;
        self.peers.take_failure().map_or(Ok(()), Err)?;
        let windows = requests.iter().filter_map(|request| request.window.as_ref());
        windows.map(|window| read::<u32>(self.peers.context(), window.address(), self.num_starts())).collect()
    }

    /// Number of words that say where the keys start which a rank asks for.
    pub(super) fn num_starts(&self) -> usize {
        start_of(self.owners.len(), self.peers.world_size()) / 4
    }

    /// Enqueues giving all ranks the rows that answer for missing ones, if there are any.
    fn share_out_of_vocabulary(&mut self, stream: Stream) -> Result<()> {
        let shard = &mut self.shard;
        shard.workspace.enter(stream)?;
        if shard.tables.iter().all(|table| table.out_of_vocabulary_row == 0) {
            return Ok(());
        }
        shard.workspace.describe(&mut shard.tables, stream)?;
        let rows = SharedRows {
            tables: shard.workspace.tables(),
            requests: self.asking.requests(),
            of_ranks: self.on_boards(rows_of_board(self.owners.len())),
            stride: self.row_stride as u32,
            num_tables: self.owners.len() as u32,
        };
        self.shard.workspace.share_out_of_vocabulary(&self.on_device, &rows, stream)?;
        self.peers.nccl().map_or(Ok(()), |nccl| self.broadcast_out_of_vocabulary(nccl, stream))
    }

    /// Returns the features of the keys of all ranks: one for each table and rank. Those of ids of weight 0 follow. `starts`: of the keys,
    /// if the host knows them.
    fn serving(
        &mut self,
        requests: &[RankRequest],
        starts: Option<&[Vec<u32>]>,
        stream: Stream,
    ) -> Result<Serving> {
        let (rank, world_size) = (self.peers.rank(), self.peers.world_size());
        let has_silent = requests.iter().any(|request| request.asks_silent);
        let takes_part = |&t: &usize| {
            // A rank has no room for rows of a table on another rank, and the bounds of what others ask for would exceed it.
            !self.owners[t].is_elsewhere() && requests.iter().any(|request| request.tables[t].num_ids > 0)
        };
        let tables: Vec<usize> = (0..self.owners.len()).filter(takes_part).collect();
        let (mut features, mut of_features, mut begins) = (Vec::new(), Vec::new(), Vec::new());
        for is_silent in [false, true].into_iter().filter(|is_silent| has_silent || !is_silent) {
            for (&table, (from, request)) in tables
                .iter()
                .flat_map(|table| requests.iter().enumerate().map(move |request| (table, request)))
            {
                let is_replicated = self.owners[table].is_replicated();
                let range = starts.map(|starts| {
                    let owner = if is_replicated { from } else { rank };
                    let first = start_of(table, world_size) / 4 + 2 * owner + usize::from(is_silent);
                    starts[from][first] as usize..starts[from][first + 1] as usize
                });
                let (begin, len) =
                    range.map_or((0, request.tables[table].num_ids), |range| (range.start, range.len()));
                let Places { keys, rows, id_counts, scores } = request.places[table];
                let of_keys =
                    |address: u64| if address == 0 { 0 } else { address.wrapping_add(8 * begin as u64) };
                let address = keys.wrapping_add(8 * begin as u64);
                let rows = rows.wrapping_add((begin * row_bytes(&self.shard.tables[table])) as u64);
                features.push(Feature {
                    name: "of other ranks",
                    table,
                    ids: Ids { address, high: 0, key_type: KeyType::Wide, len },
                    bags: Bags::Each,
                    combiner: Combiner::Sum,
                    weights: None,
                    padding_key: None,
                    is_silent,
                    at_owner: false,
                    id_counts: of_keys(id_counts),
                    scores: (scores != 0)
                        .then(|| Scores { address: of_keys(scores), score_type: ScoreType::Sent }),
                    // Each rank reads its own rows of a replicated table. Pooled bags need no rows.
                    rows: if is_replicated && from != rank || request.tables[table].is_pooled() {
                        0
                    } else {
                        rows
                    },
                    array_type: RowType::Float32,
                });
                of_features.push((table, from));
                begins.push(begin as u64);
            }
        }
        let begins_on_device = self.take_begins(features.len(), stream)?;
        let mut on_windows = [0; MAX_RANKS];
        for (to, request) in on_windows.iter_mut().zip(requests) {
            *to = request.window.as_ref().map_or(0, |window| window.address());
        }
        let remote = Remote {
            peers: self.on_device,
            call: self.num_lookups,
            requests: self.asking.requests(),
            starts: on_windows,
            has_silent,
            begins: begins_on_device.address(),
            firsts: begins_on_device.at(features.len()),
        };
        if starts.is_none() {
            self.share_out_of_vocabulary(stream)?;
        }
        let served = Served {
            number: 0,
            starts: Vec::new(),
            requests: requests.iter().map(|request| request.tables.clone()).collect(),
            features: of_features,
            begins,
            begins_on_device,
            pooled: None,
        };
        Ok(Serving { features, served, remote: starts.is_none().then_some(remote) })
    }

    /// Returns device memory for two words for each feature, zeros.
    fn take_begins(&mut self, num_features: usize, stream: Stream) -> Result<Buffer<u32>> {
        let num_words = 2 * num_features;
        let fits = self.spare_begins.iter().position(|spare| spare.len() >= num_words);
        let begins = match fits {
            Some(i) => self.spare_begins.swap_remove(i),
            None => Buffer::new(self.peers.context(), num_words.next_power_of_two())?,
        };
        self.spare_begins.truncate(SPARE_BEGINS);
        begins.zero(stream)?;
        Ok(begins)
    }

    /// Enqueues pooling the rows that have come. Returns the number of the lookup, or 0 if it is not saved.
    fn pool(&mut self, asked: Asked, stream: Stream) -> Result<u64> {
        let Asked { features, layout, started, window, .. } = asked;
        self.take_pooled_rows(&features, &layout, window.address(), stream)?;
        let front = &mut self.front;
        front.workspace.write_rows(&started, &features, stream)?;
        let saved = front.workspace.end(started, &front.tables, &features);
        let Some(saved) = saved else {
            front.reuse_window(Some(window));
            return Ok(0);
        };
        let number = front.next_lookup;
        let mut lookup = SavedLookup::new(number, saved);
        lookup.window = Some(window);
        front.save(lookup);
        Ok(number)
    }
}
