// Reads parts of arrays with zarrita, for tests/read/test_zarrita.py.
//
// stdin: JSON of [{place, path, box}, ...]; a place is an http url, a zip file or a folder.
// stdout: JSON of [{dtype, shape, data (base64)} or {error}, ...] in the same order.

import fs from "node:fs";
import { FileSystemStore, ZipFileStore } from "@zarrita/storage";
import * as zarr from "zarrita";

function openStore(place) {
  const isZip = place.endsWith(".zip");
  if (place.startsWith("http")) return isZip ? ZipFileStore.fromUrl(place) : new zarr.FetchStore(place);
  if (isZip) return ZipFileStore.fromBlob(new Blob([fs.readFileSync(place)]));
  return new FileSystemStore(place);
}

async function read({ place, path, box }) {
  const root = await zarr.open.v3(openStore(place), { kind: "group" });
  const array = await zarr.open.v3(root.resolve(path), { kind: "array" });
  const selection = box && box.map(([start, stop]) => zarr.slice(start, stop));
  // zarr.get returns a bare number for a 0-dimensional array.
  const found = array.shape.length ? await zarr.get(array, selection) : await array.getChunk([]);
  const values = array.dtype === "bool" ? Uint8Array.from(found.data, Number) : found.data;
  const bytes = Buffer.from(values.buffer, values.byteOffset, values.byteLength);
  return { dtype: array.dtype, shape: found.shape, data: bytes.toString("base64") };
}

const answers = [];
for (const part of JSON.parse(fs.readFileSync(0))) {
  answers.push(await read(part).catch((error) => ({ error: String(error) })));
}
console.log(JSON.stringify(answers));
