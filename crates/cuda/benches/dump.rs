//! Training steps while a dump of the tables is written: the longest step and the mean one, beside steps before it. Then the same dump
//! written while training waits, in its place and in an empty directory, and plain writes of as many bytes before and after, and in place
//! of as many. Then a load of the dump, and a plain read of its files.
//!
//!     dump [DIRECTORY] [ROWS]

#![allow(unsafe_code)]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use common::training::{Gpu, Work, ids, normal, work};
use common::{Bench, fill, median};
use sok_core::checkpoint::{DumpOptions, LoadOptions, dump, freeze, load};
use sok_core::contract::group::Group;
use sok_core::contract::table::{Contents, Table};
use sok_cuda::memory::Buffer;

const BATCHES: usize = 8;
const STEPS: usize = 400;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let directory: PathBuf = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from).join("sok-dump");
    let rows: u64 = arguments.next().map_or(1 << 20, |rows| rows.parse().unwrap());
    let bench = Bench::start("a dump while training goes on");
    let work = Work { name: "26 x 65,536, dim 64, Zipf", ..work("", 26, 65_536, 1, rows) };
    let gradients = normal(work.samples * work.dim * work.tables);
    let context = &bench.device.context;
    let inputs: Vec<_> =
        (0..BATCHES).map(|step| Buffer::from_slice(context, &ids(&work, step)).unwrap()).collect();
    let numbers = Buffer::from_slice(context, &[0.01, 1.0, 1.0, 1.0]).unwrap();
    let mut gpu = Gpu::new(&bench, &work, &gradients);
    fill(&bench, &mut gpu.group, work.shape(), work.vocabulary, gpu.rows.address());
    let mut next = 0;
    let mut step = |gpu: &mut Gpu| {
        gpu.step(&inputs[next % BATCHES], &numbers, true);
        next += 1;
        bench.mark()
    };
    let times = |marks: &[cudarc::driver::CudaEvent]| -> Vec<f32> {
        bench.device.synchronize().unwrap();
        marks.windows(2).map(|m| m[0].elapsed_ms(&m[1]).unwrap()).collect()
    };
    (0..50).for_each(|_| drop(step(&mut gpu)));
    let marks: Vec<_> = (0..STEPS).map(|_| step(&mut gpu)).collect();
    let before = times(&marks);

    let options = DumpOptions::default();
    let mean = |times: &[f32]| times.iter().sum::<f32>() / times.len() as f32;
    println!(
        "| steps | copy ms | number | median ms | mean ms | mean over before | longest ms | second longest |\n|---|---|---|---|---|---|---|---|"
    );
    let print = |name: &str, copy: &str, times: &[f32]| {
        let mut sorted = times.to_vec();
        sorted.sort_by(f32::total_cmp);
        let [.., second, longest] = sorted[..] else { return };
        let (mean, before) = (mean(times), mean(&before));
        println!(
            "| {name} | {copy} | {} | {:.3} | {mean:.3} | {:.3} | {longest:.1} | {second:.1} |",
            times.len(),
            median(times),
            mean / before
        );
    };
    print("before", "", &before);
    let mut seconds = 0.0;
    // Before the first dump, the tables have no memory for their changes.
    for name in ["the first dump", "the next"] {
        let mut marks = vec![step(&mut gpu)];
        let start = Instant::now();
        let frozen = freeze(&directory, &mut gpu.group.tables_mut(), &options, None).unwrap();
        let freezing = start.elapsed().as_secs_f32() * 1e3;
        let path = directory.clone();
        let writer = std::thread::spawn(move || {
            let start = Instant::now();
            let contents: Vec<&dyn Contents> = frozen.contents.iter().map(|table| &**table).collect();
            dump(&path, &contents, &[], &options).unwrap();
            let seconds = start.elapsed().as_secs_f64();
            drop(frozen);
            seconds
        });
        while !writer.is_finished() {
            marks.push(step(&mut gpu));
        }
        seconds = writer.join().unwrap();
        print(name, &format!("{freezing:.1}"), &times(&marks));
    }
    let bytes: u64 =
        std::fs::read_dir(&directory).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
    println!("\n{:.1} GB in 26 tables. The copy waits for the step before it.", bytes as f64 / 1e9);
    let speed = |seconds: f64| bytes as f64 / 1e9 / seconds;
    let before_dump = plain(&directory, bytes);
    remove_plain(&directory);
    let mut dump_waiting = || {
        let start = Instant::now();
        gpu.group.settle_tables();
        let tables: Vec<&dyn Contents> =
            (0..work.tables).map(|t| gpu.group.table(t) as &dyn Contents).collect();
        dump(&directory, &tables, &[], &options).unwrap();
        start.elapsed().as_secs_f64()
    };
    let replacing = dump_waiting();
    std::fs::remove_dir_all(&directory).unwrap();
    std::fs::create_dir(&directory).unwrap();
    let [plain_new, plain_replacing] = [(); 2].map(|()| plain(&directory, bytes));
    remove_plain(&directory);
    let new = dump_waiting();
    let after = plain(&directory, bytes);
    remove_plain(&directory);
    println!("\n| written | GB/s |\n|---|---|");
    println!("| plain bytes | {:.2} |", speed(before_dump));
    println!("| while training goes on, in place of a dump | {:.2} |", speed(seconds));
    println!("| while training waits, in place of a dump | {:.2} |", speed(replacing));
    println!("| plain bytes, in place of as many | {:.2} |", speed(plain_replacing));
    println!("| plain bytes, nothing to replace | {:.2} |", speed(plain_new));
    println!("| while training waits, nothing to replace | {:.2} |", speed(new));
    println!("| plain bytes again | {:.2} |", speed(after));
    println!("\n| read | from the disk, GB/s | from the cache, GB/s |\n|---|---|---|");
    let print = |name: &str, read: &mut dyn FnMut()| {
        let [cold, warm] = [true, false].map(|is_cold| {
            if is_cold {
                forget_files(&directory);
            }
            let start = Instant::now();
            read();
            start.elapsed().as_secs_f64()
        });
        println!("| {name} | {:.2} | {:.2} |", speed(cold), speed(warm));
    };
    print("plain bytes", &mut || read_files(&directory));
    print("into the tables", &mut || load_tables(&directory, gpu.group.tables_mut()));
    print("plain bytes again", &mut || read_files(&directory));
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Writes a plain file of `bytes` bytes, syncs it, and renames it over the plain file of the last call. Returns the seconds that this takes.
fn plain(directory: &Path, bytes: u64) -> f64 {
    let start = Instant::now();
    let piece = vec![7u8; 64 << 20];
    let aside = directory.join("aside");
    let mut file = File::create(&aside).unwrap();
    (0..bytes / piece.len() as u64).for_each(|_| file.write_all(&piece).unwrap());
    file.sync_all().unwrap();
    std::fs::rename(&aside, directory.join("plain")).unwrap();
    start.elapsed().as_secs_f64()
}

fn remove_plain(directory: &Path) {
    std::fs::remove_file(directory.join("plain")).unwrap();
}

/// Drops the files of a directory from the system's cache.
fn forget_files(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let file = File::open(entry.unwrap().path()).unwrap();
        file.sync_all().unwrap();
        // SAFETY: The call changes no memory of the process.
        let result = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        assert_eq!(result, 0);
    }
}

fn read_files(directory: &Path) {
    let mut piece = vec![0; 16 << 20];
    for entry in std::fs::read_dir(directory).unwrap() {
        let mut file = File::open(entry.unwrap().path()).unwrap();
        while file.read(&mut piece).unwrap() > 0 {}
    }
}

fn load_tables(directory: &Path, tables: Vec<&mut dyn Table>) {
    let names: Vec<String> = tables.iter().map(|table| table.config().name.clone()).collect();
    let mut targets: Vec<(&str, &mut dyn Table)> = names.iter().map(String::as_str).zip(tables).collect();
    load(directory, &mut targets, &LoadOptions::default()).unwrap();
}
