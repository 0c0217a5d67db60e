"use strict";
/* A run, and several runs side by side: the same pages in report.html and on the board. */
const View = (() => {
  const { h, number, bytes, seconds, words, unit, higherIsBetter, lines, spark, matrix, choice, colourBar } = Draw;
  const CHIEF = ["accuracy", "psnr", "map", "pck", "top1", "recall", "ssim", "ap"];  // what people ask for first
  const rank = (name) => { const k = CHIEF.findIndex((c) => name.toLowerCase().includes(c)); return (name.startsWith("client_") ? 20 : 0) + (higherIsBetter(name) ? 0 : 10) + (k < 0 ? CHIEF.length : k); };
  const chief = (names) => [...names].sort((a, b) => rank(a) - rank(b));
  const PART = /_(class_\d+|\d+x\d+)$/;  // one of many: a class, a resolution
  const points = (view, name) => view.curves.metrics[name] || [];
  const last = (list) => list.filter((v) => v !== null && v !== undefined).at(-1);
  const total = (list) => list.reduce((a, b) => a + (b || 0), 0);
  const plural = (n, word) => `${number(n)} ${word}${n === 1 ? "" : "s"}`;

  function section(id, title, lead, ...children) {
    return h("section", { id, "aria-labelledby": `${id}-title` }, h("h2", { id: `${id}-title`, text: title }), lead && h("p", { class: "lead", text: lead }), ...children);
  }
  function what(view) {
    const t = view.title, parts = [];
    if (t.task) parts.push(h("span", {}, h("b", { text: t.task })));
    if (t.algorithm && t.algorithm.length) parts.push(h("span", {}, h("b", { text: t.algorithm.join(" + ") })));
    if (t.data) parts.push(t.data);
    if (t.clients) parts.push(t.cohort && t.cohort < t.clients ? `${t.cohort} of ${t.clients} clients a round` : plural(t.clients, "client"));
    parts.push(t.rounds ? `${number(view.done)} of ${plural(t.rounds, "round")}` : plural(view.done, "round"));
    if (t.seed !== null && t.seed !== undefined) parts.push(`seed ${t.seed}`);
    return parts.flatMap((p, k) => (k ? [" · ", p] : [p]));
  }
  function masthead(brand, title, status, ...below) {
    return h("header", {}, h("div", { class: "masthead" }, h("div", {}, h("div", { class: "brand" }, brand), h("h1", { text: title })), h("div", { class: "tools", style: "margin:0" }, status && h("span", { class: `status ${status.replaceAll(" ", "-")}`, text: status }), Draw.themeButton())), ...below);
  }
  function problems(view) {
    const list = [...view.problems];
    if (view.status === "empty") list.unshift("This folder is empty.");
    if (view.status === "not a run") list.unshift("This folder is not a run: it has no config.toml, metrics.jsonl or summary.json.");
    return list.length ? h("ul", { class: "problems" }, list.map((text) => h("li", { text }))) : null;
  }

  /* Final metrics, each with the comparison that matters: the named baseline if the run has one, else its own first evaluation. */
  const BASELINES = ["input", "before", "blurred", "bicubic", "observed", "local", "alone", "baseline", "start"], REFERENCE = new RegExp(`_(${BASELINES.join("|")})$`);
  function baseline(view, name) {
    for (const p of view.pictures) {  // a before-and-after that says what both are worth, if its "after" is this result
      const measured = Object.entries(p.facts).filter(([, v]) => v && typeof v === "object" && Number.isFinite(v[name]));
      const after = measured.findIndex(([, v]) => Math.abs(v[name] - view.final[name]) <= 1e-3 * Math.abs(view.final[name]));
      if (after > 0) return [measured[0][0], measured[0][1][name], measured[0][0]];
    }
    for (const b of BASELINES) for (const key of [`${name}_${b}`, `${b}_${name}`]) if (key in view.final) return [b, view.final[key], key];
    const known = Object.entries(view.summary.references || {}).filter(([, m]) => Number.isFinite(m?.[name])).sort(([, a], [, b]) => (b[name] - a[name]) * (higherIsBetter(name) ? 1 : -1));
    if (known.length) return [known[0][0], known[0][1][name], known[0][0]];  // the best that was reached without learning
    const history = points(view, name);
    return history.length > 1 ? [`round ${history[0][0]}`, history[0][1], null] : null;
  }
  function headline(view) {
    const node = h("div", { class: "headline" }), used = new Set();
    const names = chief(Object.keys(view.final));
    for (const name of names) { const b = baseline(view, name); if (b && b[2]) used.add(b[2]); }
    const tell = names.filter((n) => !used.has(n) && !/_(worst|spread)$/.test(n) && !PART.test(n)).slice(0, 3);
    tell.forEach((name, k) => {
      const value = view.final[name], base = baseline(view, name), worst = view.final[`${name}_worst`], history = points(view, name).map((p) => p[1]), note = h("div", { class: "note" });
      if (base) {
        const gain = value - base[1], better = gain === 0 ? "" : gain > 0 === higherIsBetter(name) ? "up" : "down";
        note.append(h("span", { class: better, text: `${gain >= 0 ? "+" : "−"}${number(Math.abs(gain), 3)}` }), ` from ${number(base[1])} (${base[2] ? words(base[0]) : base[0]})`);
      }
      if (worst !== undefined) note.append(h("br"), `worst client ${number(worst)}`);
      node.append(h("div", { class: k ? "figure-number minor" : "figure-number", "data-metric": name }, h("div", { class: "name", text: words(name === "loss" ? "test_loss" : name) }), h("div", { class: "value" }, number(value), unit(name) && h("span", { class: "unit", text: unit(name) })), note, history.length > 2 && k < 2 && spark(history)));
    });
    const loss = last(view.curves.loss);
    if (tell.length < 3 && loss !== undefined) node.append(h("div", { class: tell.length ? "figure-number minor" : "figure-number" }, h("div", { class: "name", text: `${lossName([view]).toLowerCase()}, mean of clients` }), h("div", { class: "value", text: number(loss) }), h("div", { class: "note", text: `from ${number(view.curves.loss.find((v) => v !== null))}` })));
    const moved = traffic(view);
    if (view.done) node.append(h("div", { class: "figure-number minor" }, h("div", { class: "name", text: "time and traffic" }), h("div", { class: "value", text: seconds(spent(view)) }), h("div", { class: "note", text: moved ? `${bytes(moved)} over the wire` : "" })));
    return [node, ...view.references.map((text) => h("p", { class: "soft small references", text }))];
  }

  // ---- finished runs that differ only in their seed belong together
  function grouped(views) {
    const found = new Map();
    for (const v of views) {
      const { "federation.seed": _, ...rest } = v.settings, whole = v.status === "finished" && Object.keys(rest).length, key = whole ? JSON.stringify(rest) : v.name;
      found.set(key, [...(found.get(key) || []), v]);
    }
    return [...found.values()].map((members) => {
      const above = new Set(members.map((v) => v.name.split("/").slice(0, -1).join("/"))), stack = (members[0].title.algorithm || []).join(" + ");
      const common = above.size === 1 && views.some((v) => !members.includes(v) && !v.name.startsWith([...above][0] + "/")) ? [...above][0] : "";  // fedprox/seed-0, fedprox/seed-1
      return { members, name: members.length > 1 ? `${common || stack || members[0].name} (${members.length} seeds)` : members[0].name };
    });
  }
  const mean = (list) => list.reduce((a, b) => a + b, 0) / list.length;
  const deviation = (list) => (list.length > 1 ? Math.sqrt(list.reduce((a, b) => a + (b - mean(list)) ** 2, 0) / (list.length - 1)) : 0);
  /* One curve for a group: the mean where all seeds have a value, with a band of one standard deviation. */
  function merged(group, k, take) {
    const tables = group.members.map((v) => { const [x, y] = take(v); return new Map(x.map((at, i) => [at, y[i]]).filter(([, value]) => value !== null)); });
    const x = [...tables[0].keys()].filter((at) => tables.every((t) => t.has(at))), values = x.map((at) => tables.map((t) => t.get(at)));
    return { name: group.name, x, y: values.map(mean), k, band: group.members.length > 1 ? values.map(deviation) : null };
  }

  // ---- curves
  /* What clients report as their loss: of those that train it is one, of those that restore an image it is not. */
  const lossName = (views) => { const names = new Set(views.map((v) => v.summary.loss_name || "loss")), one = names.size === 1 ? [...names][0] : "loss"; return one[0].toUpperCase() + one.slice(1); };
  const series = (name, x, y, k, more) => ({ name, x, y, k, ...more });
  const fromPoints = (list) => [list.map((p) => p[0]), list.map((p) => p[1])];
  /* Metrics that belong together share a chart: accuracy with its mean and worst client, all classes, all resolutions. */
  function families(names) {
    const out = new Map();
    for (const name of chief(names)) {
      if (name.endsWith("_spread")) continue;
      const root = name.replace(REFERENCE, "").replace(/^client_/, "").replace(/_worst$/, "").replace(/_class_\d+$/, "_by_class").replace(/_\d+x\d+$/, "");
      out.set(root, [...(out.get(root) || []), name]);
    }
    return out;
  }
  function curveData(views) {
    const many = views.length > 1, charts = [], groups = grouped(views);
    const over = (take) => (many ? groups.map((g, k) => merged(g, k, take)) : [series("", ...take(views[0]), 0)]);
    const part = (word) => { const name = views[0].federation.classes[/^class_(\d+)$/.exec(word)?.[1]]; return name === undefined ? words(word) : String(name); };
    const until = Math.max(...views.map((v) => (v.status === "running" ? (v.title.rounds || 1) - 1 : 0)));
    charts.push({ id: "training", title: `${lossName(views)}, mean of clients`, log: true, until, series: over((v) => [v.curves.round, v.curves.loss]) });
    for (const [root, names] of families(new Set(views.flatMap((v) => Object.keys(v.curves.metrics))))) {
      if (many && names.every((n) => PART.test(n))) continue;
      const who = (name) => (REFERENCE.test(name) ? REFERENCE.exec(name)[1] : PART.test(name) ? part(PART.exec(name)[1]) : names.some((n) => /\d+x\d+$/.test(n)) ? "all" : name.endsWith("_worst") ? "worst client" : name.startsWith("client_") ? "mean of clients" : "server");
      charts.push({ id: root, title: words(root === "loss" ? "test_loss" : names.length > 1 ? root : names[0]), unit: unit(root), log: !higherIsBetter(root), until, series: many ? over((v) => fromPoints(points(v, names[0]))) : names.map((name, j) => series(names.length > 1 ? who(name) : "", ...fromPoints(points(views[0], name)), j)) });
    }
    const varies = (name) => views.some((v) => new Set((v.curves.state[name] || []).map((p) => p[1])).size > 1);
    for (const name of [...new Set(views.flatMap((v) => Object.keys(v.curves.state)))].filter(varies).slice(0, 8)) {
      charts.push({ id: `state-${name}`, title: `${words(name)} (server state)`, log: true, until, series: over((v) => fromPoints(v.curves.state[name] || [])) });
    }
    return charts;
  }
  function costData(views) {
    const many = views.length > 1, groups = grouped(views);
    return [
      { id: "seconds", title: "Seconds per round", zero: true, format: seconds, series: many ? groups.map((g, k) => merged(g, k, (v) => [v.curves.round, v.curves.seconds])) : [series("", views[0].curves.round, views[0].curves.seconds, 0, { area: true })] },
      { id: "bytes", title: "Bytes per round", zero: true, format: bytes, series: many ? groups.map((g, k) => merged(g, k, (v) => [v.curves.round, v.curves.bytes_up.map((b, i) => (b ?? 0) + (v.curves.bytes_down[i] ?? 0))])) : [series("down to clients", views[0].curves.round, views[0].curves.bytes_down, 0), series("up to the server", views[0].curves.round, views[0].curves.bytes_up, 1)] },
    ].filter((c) => c.series.some((one) => one.y.some((v) => v)));
  }
  /* More curves than eyes can tell apart: one row each instead, stronger is higher. */
  function rows(first) {
    const grid = matrix({ label: "", rows: [], columns: [], cell: () => null, say: () => "" }), title = h("h3"), node = h("section", { class: "chart" }, h("header", {}, title), grid.node);
    function update(data) {
      const columns = [...new Set(data.series.flatMap((one) => one.x))].sort((a, b) => a - b), all = data.series.flatMap((one) => one.y).filter((v) => v !== null);
      const low = Math.min(...all), high = Math.max(...all), at = (r, c) => { const i = data.series[r].x.indexOf(columns[c]); return i < 0 ? null : data.series[r].y[i]; };
      title.textContent = data.title;
      grid.update({ label: data.title, rows: data.series.map((one) => one.name), columns, rest: `From ${number(low)} (faintest) to ${number(high)} (strongest); columns are rounds.`, cell: (r, c) => { const v = at(r, c); return v === null ? null : { t: (v - low) / (high - low || 1) }; }, say: (r, c) => `${data.series[r].name}, round ${columns[c]}: ${number(at(r, c))}` });
    }
    update(first);
    return { node, update };
  }
  function charts() {
    const node = h("div", { class: "grid" }), shown = new Map();
    return { node, update(list) {
      for (const data of list) {
        if (!shown.has(data.id)) { const chart = data.series.length > 12 ? rows(data) : lines(data); chart.node.dataset.chart = data.id; shown.set(data.id, chart); node.append(chart.node); }
        else shown.get(data.id).update(data);
      }
    } };
  }

  // ---- the federation
  const clientName = (view, id) => { const names = view.federation.names; return names[id] !== undefined ? String(names[id]) : `client ${id}`; };
  const short = (view, id) => { const names = view.federation.names; return names[id] !== undefined ? String(names[id]) : String(id); };

  function holdings(view) {
    const f = view.federation, counts = f.labels.length ? f.labels : null, sizes = f.sizes;
    if (!sizes.length) return null;
    const clients = sizes.map((_, k) => k), all = total(sizes), out = [];
    const least = Math.min(...sizes), most = Math.max(...sizes);
    const summary = `${plural(sizes.length, "client")} hold ${plural(all, "example")}: ${least === most ? number(least) : `${number(least)} to ${number(most)}`} each.`;
    if (counts && counts[0].length > 1) {
      const classes = counts[0].map((_, c) => (f.classes[c] !== undefined ? String(f.classes[c]) : String(c)));
      const top = Math.max(1, ...counts.map((row) => Math.max(...row)));
      out.push(matrix({ label: "Examples of each class held by each client", rows: classes, columns: clients, dots: true, rest: "Each dot's area is a number of examples; columns are clients.",
        cell: (r, c) => ({ t: (counts[c]?.[r] || 0) / top }), say: (r, c) => `${clientName(view, c)} holds ${number(counts[c]?.[r] || 0)} of ${classes[r]}, of ${number(sizes[c])} in all` }).node);
    } else if (least < most) {
      const chart = lines({ title: "Examples per client", xname: "client", zero: true, series: [series("", clients, sizes, 0, { area: true })] });
      out.push(chart.node);
    }
    return [...[summary, ...f.remarks].map((text) => h("p", { class: "soft small", text })), ...out];
  }

  function participation() {
    let measure = null, view = null, paintLegend = () => {};
    Draw.onTheme(() => paintLegend());
    const grid = matrix({ label: "Clients by rounds", rows: [], columns: [], cell: () => null, say: () => "" });
    const tools = h("div", { class: "tools" }), legend = h("div", { class: "legend" }), node = h("div", {}, tools, grid.node, legend);
    function draw() {
      const { ids, rounds, columns, heard, lost } = view.clients;
      const has = columns.map((name, k) => [name, k + 1, name[0].toUpperCase() + name.slice(1)]).filter(([, k]) => heard.some((rows) => rows.some((row) => row[k] !== null)));
      if (!measure || !has.some(([m]) => m === measure)) measure = has[0]?.[0] || "heard";
      tools.replaceChildren(has.length > 1 ? choice(has.map(([m, , text]) => [m, text]), measure, (m) => { measure = m; draw(); }, "Colour shows") : "");
      const column = has.find(([m]) => m === measure)?.[1], place = new Map(ids.map((id, r) => [id, r])), cells = new Map(), values = [];
      heard.forEach((rows, c) => {
        const sum = measure === "weight" ? rows.reduce((a, row) => a + (row[1] || 0), 0) : 1;
        for (const row of rows) {
          const v = column && row[column] !== null ? row[column] / (sum || 1) : null;
          cells.set(`${place.get(row[0])},${c}`, { v, raw: row });
          if (v !== null) values.push(v);
        }
      });
      lost.forEach((who, c) => who.forEach((id) => cells.set(`${place.get(id)},${c}`, { lost: true })));
      values.sort((a, b) => a - b);
      const low = measure === "loss" ? values[Math.floor(values.length * 0.01)] ?? 0 : 0, high = values[Math.ceil(values.length * 0.99) - 1] ?? 1;
      const share = (v) => (measure === "weight" ? `${number(v * 100, 3)} %` : number(v, 3));
      grid.update({ label: `${measure} of each client in each round`, rows: ids.map((id) => short(view, id)), columns: rounds,
        cell: (r, c) => { const cell = cells.get(`${r},${c}`); return cell && { lost: cell.lost, t: cell.v === null || cell.v === undefined ? null : high > low ? (cell.v - low) / (high - low) : 1 }; },
        say: (r, c) => {
          const cell = cells.get(`${r},${c}`), who = `${clientName(view, ids[r])}, round ${rounds[c]}: `;
          if (!cell) return `${who}not asked`;
          if (cell.lost) return `${who}asked, reply lost`;
          return who + [cell.v !== null && measure === "weight" ? `${share(cell.v)} of the mean` : null, cell.raw[2] !== null ? `loss ${number(cell.raw[2])}` : null, cell.raw[3] !== null ? `${number(cell.raw[3])} examples` : null].filter(Boolean).join(", ");
        } });
      const bar = () => (values.length ? colourBar(Draw.isDark() ? "dark" : "light", share(low), `${share(high)}`) : "");
      paintLegend = () => legend.replaceChildren(bar(), measure === "weight" ? "share of the round's weighted mean" : measure === "loss" ? `${lossName([view]).toLowerCase()} reported by the client` : measure === "examples" ? "examples used" : measure === "heard" ? "reply heard" : `${measure}, as the client reported it`,
        total(lost.map((l) => l.length)) ? h("span", { class: "swatch" }, h("i", { text: "×" }), "asked, reply lost") : "", h("span", { class: "swatch" }, h("i", {}), "not asked"), view.clients.step > 1 ? `every ${view.clients.step}th round shown` : "");
      paintLegend();
    }
    return { node, update(next) { view = next; draw(); } };
  }
  function lostTable(view) {
    if (!view.lost.length) return [];
    const rows = view.lost.map((one) => h("tr", {}, h("td", { text: one.reason }), h("td", { class: "n", text: number(one.times) }), h("td", { text: one.clients.slice(0, 12).map((id) => short(view, id)).join(", ") + (one.clients.length > 12 ? ", …" : "") })));
    return [h("h3", { style: "margin:28px 0 6px", text: "Lost replies" }), h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { text: "Reason" }), h("th", { class: "n", text: "Times" }), h("th", { text: "Clients" }))), h("tbody", {}, rows)))];
  }

  // ---- what left each client
  function leftTables(view) {
    const left = view.left, day = (t) => t.slice(0, 19).replace("T", " ");
    const table = (heads, rows) => h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map(([text, n]) => h("th", { class: n ? "n" : "", text })))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text, k) => h("td", { class: heads[k][1] ? "n" : "", text })))))));
    const shield = left.protection.length && !left.readable ? `Protection: ${left.protection.join(", ")}. The server reads sums, no single reply.` : `Protection: none. ${number(left.readable)} replies left in a form that the server can read one by one; in the worst case single examples can be reconstructed from such a reply.`;
    return [
      h("p", { class: "left-protection", text: shield }),
      table([["Arrays"], ["Times", 1], ["Together", 1], ["Arrays in each", 1]], left.trees.map(([name, times, size, arrays]) => [name, number(times), bytes(size), number(arrays)])),
      h("p", { text: left.numbers.length ? `Numbers and words: ${left.numbers.map(([name, times]) => `${name} (${number(times)} times)`).join(", ")}.` : "" }),
      table([["Client"], ["Messages", 1], ["Bytes", 1], ["First (UTC)"], ["Last (UTC)"]], left.clients.map(([id, times, size, first, end]) => [short(view, id), number(times), bytes(size), day(first), day(end)])),
      left.hidden ? h("p", { class: "soft", text: `and ${number(left.hidden)} clients more` }) : "",
    ];
  }

  // ---- how to do it again
  function repeat(view) {
    const s = view.summary, facts = [], versions = s.versions && typeof s.versions === "object" ? Object.entries(s.versions).map(([k, v]) => `${k} ${v}`).join(", ") : s.versions;
    const put = (name, value) => value !== undefined && value !== null && value !== "" && facts.push(h("dt", { text: name }), h("dd", { class: "num", text: value }));
    put("Device", s.device); put("Seed", s.seed ?? view.title.seed); put("Time", Number.isFinite(s.seconds) ? seconds(s.seconds) : null); put("Peak memory", Number.isFinite(s.peak_memory) ? bytes(s.peak_memory) : null);
    put("Down to clients", Number.isFinite(s.bytes_down) ? bytes(s.bytes_down) : null); put("Up to the server", Number.isFinite(s.bytes_up) ? bytes(s.bytes_up) : null); put("Versions", versions);
    const command = (Array.isArray(s.command) ? s.command.join(" ") : s.command) || (view.config && "fedlens run config.toml --out AGAIN");
    return [facts.length ? h("dl", { class: "facts" }, facts) : "", command && h("pre", { tabindex: 0, class: "command", text: command }), view.config && h("details", { open: view.config.length < 4000 }, h("summary", { text: "Resolved configuration (config.toml)" }), h("pre", { tabindex: 0, text: view.config }))];
  }
  function roundsTable(view) {
    const c = view.curves, details = h("details", { style: "margin-top:20px" }, h("summary", { text: "Rounds as a table" }));
    details.addEventListener("toggle", () => {
      if (!details.open || details.querySelector("table")) return;
      const heads = ["Round", "Seconds", "Loss", "Down", "Up", "Asked", "Heard", "Lost"], rows = c.round.map((r, i) => [number(r), number(c.seconds[i], 3), number(c.loss[i]), bytes(c.bytes_down[i] ?? NaN), bytes(c.bytes_up[i] ?? NaN), number(c.asked[i]), number(c.heard[i]), number(c.lost[i])]);
      details.append(h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { class: "n", text })))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map((text) => h("td", { class: "n", text }))))))));
    });
    return details;
  }

  /* What `fedlens audit` found, in short; the pictures are in audit.html beside the report. */
  function audit(found) {
    if (!found || !found.headline) return [];
    const heads = ["Attack", "Protection", "Measure", "Attacker", "Learned nothing"];
    const rows = found.rows.map((r) => h("tr", {}, h("td", { text: r.attack }), h("td", { text: r.protection }), h("td", { text: r.measure }), h("td", { class: "n", text: number(r.score) }), h("td", { class: "n", text: number(r.baseline) })));
    const names = ["truth: never sent", "what the attacker has", "what one has who saw no message"];
    const shown = found.picture.images.length === 3 ? h("figure", { class: "read" }, h("div", {}, found.picture.images.map((src, k) => h("div", {}, h("img", { src, alt: names[k] }), h("span", { text: names[k] })))), h("figcaption", { text: found.picture.label })) : "";
    return [h("p", { text: found.headline }), shown, h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { text })))), h("tbody", {}, rows))), h("p", { class: "soft", text: `${found.caution} Pictures: audit.html in the run folder.` })];
  }

  /* One run. update(view) redraws what changed and keeps what the reader has set. */
  function run(first, brand) {
    const gallery = Pictures.gallery(), curves = charts(), cost = charts(), who = participation();
    const head = h("div"), top = h("div"), facts = h("div"), lost = h("div"), held = h("div"), table = h("div"), left = h("div");
    const pictures = section("pictures", "Pictures", "", gallery.node), curvesPart = section("curves", "Curves", "", Draw.smoothingTool(), curves.node);
    const federation = section("federation", "The federation", "", held, who.node, lost), costPart = section("cost", "Cost", "", cost.node, table), repeatPart = section("repeat", "Do it again", "", facts);
    const seen = h("div"), auditPart = section("audit", "What could be read", "", seen);
    const leftPart = section("left", "What left each client", "Added up from the clients' ledgers; `fedlens ledger RUN --verify` checks that nobody touched them.", left);
    const parts = [pictures, curvesPart, federation, leftPart, costPart, auditPart, repeatPart], node = h("article", {}, head, top, ...parts);
    let heldBy = null;
    function update(view) {
      const any = (list) => list.some((v) => v !== null && v !== undefined);
      const shown = [view.pictures.length > 0, any(view.curves.loss) || Object.keys(view.curves.metrics).length > 0, view.clients.ids.length > 0 || view.federation.sizes.length > 0, view.left.clients.length > 0, any(view.curves.seconds), Boolean(view.audit && view.audit.headline), Boolean(view.config || view.summary.seconds)];
      parts.forEach((part, k) => { part.hidden = !shown[k]; });
      const nav = h("nav", { class: "parts", "aria-label": "Parts of this page" }, parts.filter((p) => !p.hidden).map((p) => h("a", { href: `#${p.id}`, text: p.querySelector("h2").textContent, onclick: (e) => { e.preventDefault(); p.scrollIntoView(); p.querySelector("a, button, [tabindex], input, summary")?.focus({ preventScroll: true }); } })));
      head.replaceChildren(masthead(brand, view.name, view.status, h("div", { class: "what" }, what(view)), problems(view), nav.children.length ? nav : ""));
      top.replaceChildren(...headline(view));
      gallery.update(view.pictures);
      curves.update(curveData([view]));
      cost.update(costData([view]));
      const key = JSON.stringify(view.federation);
      if (key !== heldBy) { heldBy = key; const part = holdings(view); held.replaceChildren(...(part ? [h("h3", { text: "Who holds what" }), ...part, h("h3", { style: "margin:32px 0 0", text: "Who took part" })] : [])); }
      who.node.style.display = view.clients.ids.length ? "" : "none";
      if (view.clients.ids.length) who.update(view);
      lost.replaceChildren(...lostTable(view));
      if (view.left.clients.length) left.replaceChildren(...leftTables(view).filter(Boolean));
      if (!table.querySelector("details[open]")) table.replaceChildren(roundsTable(view));
      seen.replaceChildren(...audit(view.audit));
      facts.replaceChildren(...repeat(view).filter(Boolean));
    }
    update(first);
    return { node, update };
  }

  // ---- several runs
  const traffic = (v) => total(v.curves.bytes_down) + total(v.curves.bytes_up), spent = (v) => v.summary.seconds ?? total(v.curves.seconds);
  function results(views) {
    const groups = grouped(views);
    if (groups.length === views.length) return singles(views);
    const names = chief(new Set(views.flatMap((v) => Object.keys(v.final)))).filter((n) => !n.endsWith("_spread") && !PART.test(n)).slice(0, 8);
    const values = (g, n) => g.members.map((v) => v.final[n]).filter((x) => x !== undefined && x !== null);
    const best = Object.fromEntries(names.map((n) => { const all = groups.map((g) => values(g, n)).filter((x) => x.length).map(mean); return [n, higherIsBetter(n) ? Math.max(...all) : Math.min(...all)]; }));
    const rows = groups.map((g, k) => h("tr", {}, h("td", {}, h("span", { style: `color: var(--c${k % 8})`, "aria-hidden": "true", text: "● " }), g.name),
      names.map((n) => { const x = values(g, n), m = mean(x), places = (number(m).split(".")[1] || "").length; return h("td", { class: groups.length > 1 && m === best[n] ? "n best" : "n", text: x.length ? `${number(m)}${x.length > 1 ? ` ± ${deviation(x).toFixed(places)}` : ""}` : "–" }); }),
      h("td", { class: "n", text: seconds(mean(g.members.map(spent))) }), h("td", { class: "n", text: bytes(mean(g.members.map(traffic))) })));
    const table = h("table", { class: "results" }, h("thead", {}, h("tr", {}, h("th", { text: "Method" }), names.map((n) => h("th", { class: "n", text: words(n === "loss" ? "test_loss" : n) + (unit(n) ? ` (${unit(n)})` : "") })), h("th", { class: "n", text: "Time" }), h("th", { class: "n", text: "Traffic" }))), h("tbody", {}, rows));
    return h("div", {}, h("div", { class: "wide", style: "margin-top:30px" }, table), h("p", { class: "small soft", style: "margin-top:8px", text: "Mean ± standard deviation over seeds." }), h("details", {}, h("summary", { text: "Every run" }), singles(views)));
  }
  function singles(views) {
    const place = new Map(grouped(views).flatMap((g, k) => g.members.map((v) => [v, k]))), names = chief(new Set(views.flatMap((v) => Object.keys(v.final)))).filter((n) => !n.endsWith("_spread") && !PART.test(n)).slice(0, 8), table = h("tbody");
    const best = Object.fromEntries(names.map((n) => { const all = views.map((v) => v.final[n]).filter((x) => x !== undefined && x !== null); return [n, higherIsBetter(n) ? Math.max(...all) : Math.min(...all)]; }));
    views.forEach((v, k) => {
      const cells = names.map((n) => {
        const value = v.final[n], gap = k && value !== undefined && views[0].final[n] !== undefined ? value - views[0].final[n] : null;
        return h("td", { class: value === best[n] && views.length > 1 ? "n best" : "n" }, number(value), gap ? h("span", { class: `small ${gap > 0 === higherIsBetter(n) ? "up" : "down"}`, text: ` ${gap > 0 ? "+" : "−"}${number(Math.abs(gap), 2)}` }) : "");
      });
      const moved = traffic(v);
      table.append(h("tr", {}, h("td", {}, h("span", { style: `color: var(--c${place.get(v) % 8})`, "aria-hidden": "true", text: "● " }), v.name, h("div", { class: "small soft", text: (v.title.algorithm || []).join(" + ") })), cells, h("td", { class: "n", text: number(last(v.curves.loss)) }), h("td", { class: "n", text: seconds(spent(v)) }), h("td", { class: "n", text: moved ? bytes(moved) : "–" }), h("td", {}, h("span", { class: `status ${v.status.replaceAll(" ", "-")}`, text: v.status }))));
    });
    return h("div", { class: "wide", style: "margin-top:30px" }, h("table", { class: "results" }, h("thead", {}, h("tr", {}, h("th", { text: "Run" }), names.map((n) => h("th", { class: "n", text: words(n === "loss" ? "test_loss" : n) + (unit(n) ? ` (${unit(n)})` : "") })), h("th", { class: "n", text: lossName(views) }), h("th", { class: "n", text: "Time" }), h("th", { class: "n", text: "Traffic" }), h("th", { text: "Status" }))), table));
  }
  function differences(views) {
    const keys = [...new Set(views.flatMap((v) => Object.keys(v.settings)))].filter((k) => new Set(views.map((v) => v.settings[k])).size > 1).sort();
    if (!keys.length) return h("p", { class: "soft", text: "The configurations are the same." });
    return h("div", { class: "wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { text: "Setting" }), views.map((v) => h("th", { text: v.name })))), h("tbody", {}, keys.map((k) => h("tr", {}, h("td", {}, h("code", { text: k })), views.map((v) => h("td", {}, h("code", { text: v.settings[k] ?? "–" }))))))));
  }
  /* Confusion matrices keep their names; those of runs that differ only in their seed are added up. */
  function confusions(from) {
    const shown = new Map(from.map(([v, p]) => [v.name, p]));
    return grouped(from.map(([v]) => v)).map(({ name, members }) => {
      const tables = members.map((v) => shown.get(v.name)), first = tables[0], { classes, counts } = first.facts;
      const sum = counts.map((row, r) => row.map((_, c) => total(tables.map((p) => p.facts.counts[r]?.[c]))));
      return { ...first, caption: `${name}: ${first.caption}`, facts: { classes, counts: sum } };
    });
  }
  /* The same picture of every run becomes one: what is equal in all (input, reference) is shown once. */
  function together(views) {
    const out = [];
    const first = views.find((v) => v.pictures.length);
    for (const model of first ? first.pictures : []) {
      const from = views.map((v) => [v, v.pictures.find((p) => p.caption === model.caption && p.kind === model.kind)]).filter(([, p]) => p);
      if (from.length < 2) continue;
      if (from.every(([, p]) => Pictures.isConfusion(p))) { out.push(...confusions(from)); continue; }
      const facts = Object.fromEntries(from.flatMap(([v, p]) => Object.entries(p.facts).map(([k, x]) => [`${v.name}: ${words(k)}`, x])));
      const all = from.flatMap(([v, p]) => p.images.map((src, k) => ({ src, id: (p.ids || p.images)[k], label: p.labels[k] || `${k + 1}`, run: v.name, range: p.ranges[k] ?? null })));
      const count = new Map();
      all.forEach((i) => count.set(i.id, (count.get(i.id) || 0) + 1));
      const shared = model.kind === "compare" ? all.filter((i, k) => count.get(i.id) >= from.length && all.findIndex((j) => j.id === i.id) === k) : [];
      const own = all.filter((i, k) => !shared.some((j) => j.id === i.id) && (model.kind !== "compare" || all.findIndex((j) => j.id === i.id) === k)).map((i) => ({ ...i, label: `${i.run}: ${i.label}` }));
      const lastOne = shared.length ? shared.slice(-1) : [], ordered = [...shared.slice(0, -1), ...own, ...lastOne];
      out.push({ caption: model.caption, kind: model.kind === "strip" ? "sheet" : model.kind, images: ordered.map((i) => i.src), labels: ordered.map((i) => i.label), facts, ranges: ordered.map((i) => i.range) });
    }
    return out;
  }
  function comparison(first, brand, title) {
    const gallery = Pictures.gallery(), curves = charts(), cost = charts(), head = h("div"), table = h("div"), settings = h("div");
    const pictures = section("pictures", "Pictures", "What all runs share is shown once; choose any two for the slider.", gallery.node);
    const node = h("article", {}, head, table, section("curves", "Curves", "", Draw.smoothingTool(), curves.node), pictures, section("cost", "Cost", "", cost.node), section("settings", "What differs", "", settings));
    head.replaceChildren(masthead(brand, title, null, h("div", { class: "what" }, grouped(first).length < first.length ? `${first.length} runs; the best value is bold.` : `${first.length} runs; differences are to the first, the best value is bold.`)));
    function update(views) {
      const list = views.flatMap((v) => v.problems.map((p) => `${v.name}: ${p}`));
      table.replaceChildren(results(views), list.length ? h("ul", { class: "problems" }, list.map((text) => h("li", { text }))) : "");
      const both = together(views);
      pictures.hidden = !both.length;
      gallery.update(both);
      curves.update(curveData(views));
      cost.update(costData(views));
      settings.replaceChildren(differences(views));
    }
    update(first);
    return { node, update };
  }
  return { run, comparison, chief };
})();
