"use strict";
/* Pictures, one function per kind (see fedlens/pictures.py). Each returns {node, update(picture)}: an update keeps slider, zoom and focus. */
const Pictures = (() => {
  const { h, number, words, scale, colourBar, choice } = Draw;

  const loaded = (src) => new Promise((done) => { const img = new Image(); img.onload = () => done(img); img.onerror = () => done(null); img.src = src; });
  const label = (picture, k) => picture.labels[k] || (picture.images.length > 1 ? `${k + 1}` : "");
  function pixels(img, width = img.naturalWidth, height = img.naturalHeight) {
    const canvas = h("canvas", { width, height }), ctx = canvas.getContext("2d", { willReadFrequently: true });
    ctx.drawImage(img, 0, 0, width, height);
    return ctx.getImageData(0, 0, width, height);
  }
  function paint(canvas, width, height, value, table) {  // value(i) -> 0..1, table: 256 colours
    canvas.width = width; canvas.height = height;
    const ctx = canvas.getContext("2d"), out = ctx.createImageData(width, height);
    for (let i = 0; i < width * height; i++) {
      const k = 3 * Math.max(0, Math.min(255, Math.round(value(i) * 255)));
      out.data[4 * i] = table[k]; out.data[4 * i + 1] = table[k + 1]; out.data[4 * i + 2] = table[k + 2]; out.data[4 * i + 3] = 255;
    }
    ctx.putImageData(out, 0, 0);
  }

  /* Pan and zoom shared by any number of stages that show the same scene. */
  function lens(onChange) {
    const at = { zoom: 1, x: 0.5, y: 0.5 };
    function set(zoom, x = at.x, y = at.y) {
      at.zoom = Math.max(1, Math.min(16, zoom));
      const half = 0.5 / at.zoom;
      at.x = Math.max(half, Math.min(1 - half, x));
      at.y = Math.max(half, Math.min(1 - half, y));
      onChange();
    }
    function place(layer, width, height, natural) {
      layer.style.transform = `translate(${((0.5 - at.x * at.zoom) * width).toFixed(2)}px, ${((0.5 - at.y * at.zoom) * height).toFixed(2)}px) scale(${at.zoom})`;
      layer.classList.toggle("crisp", (width * at.zoom) / (natural || width) >= 2.5);
    }
    /* keeps the point under (fx, fy) of the stage where it is */
    function zoomAt(factor, fx, fy) {
      const before = at.zoom, next = Math.max(1, Math.min(16, before * factor)), px = at.x + (fx - 0.5) / before, py = at.y + (fy - 0.5) / before;
      set(next, px - (fx - 0.5) / next, py - (fy - 0.5) / next);
    }
    function listen(stage, grab) {  // grab(fx) -> true: this drag moves something else (the divider)
      let held = null;
      const spot = (e) => { const b = stage.getBoundingClientRect(); return [(e.clientX - b.left) / b.width, (e.clientY - b.top) / b.height]; };
      stage.addEventListener("pointerdown", (e) => {
        const [fx, fy] = spot(e);
        held = { fx, fy, x: at.x, y: at.y, other: grab ? grab(fx, true) : false };
        stage.setPointerCapture(e.pointerId);
      });
      stage.addEventListener("pointermove", (e) => {
        if (!held) return;
        const [fx, fy] = spot(e);
        if (held.other) grab(fx, false);
        else if (at.zoom > 1) set(at.zoom, held.x - (fx - held.fx) / at.zoom, held.y - (fy - held.fy) / at.zoom);
      });
      for (const end of ["pointerup", "pointercancel"]) stage.addEventListener(end, () => { held = null; });
      stage.addEventListener("dblclick", (e) => { const [fx, fy] = spot(e); at.zoom > 7 ? set(1) : zoomAt(2, fx, fy); });
      stage.addEventListener("wheel", (e) => {  // a plain wheel scrolls the page; with Ctrl (or a pinch) it zooms
        if (!e.ctrlKey && !e.metaKey) return;
        e.preventDefault();
        zoomAt(Math.exp(-e.deltaY * 0.01), ...spot(e));
      }, { passive: false });
      stage.addEventListener("keydown", (e) => {
        const step = 0.1 / at.zoom, moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
        if (e.key === "+" || e.key === "=") set(at.zoom * 2);
        else if (e.key === "-") set(at.zoom / 2);
        else if (e.key === "0") set(1);
        else if (moves[e.key] && at.zoom > 1) set(at.zoom, at.x + moves[e.key][0], at.y + moves[e.key][1]);
        else return;
        e.preventDefault();
      });
    }
    const said = h("span", { class: "small soft num", text: "1×" });
    const buttons = h("span", { class: "group", role: "group", "aria-label": "Zoom" },
      h("button", { type: "button", text: "−", "aria-label": "Zoom out", onclick: () => set(at.zoom / 2) }),
      h("button", { type: "button", text: "+", "aria-label": "Zoom in", onclick: () => set(at.zoom * 2) }),
      h("button", { type: "button", text: "Fit", onclick: () => set(1) }));
    return { at, set, place, listen, buttons, said, tell() { said.textContent = `${at.zoom < 10 ? +at.zoom.toFixed(1) : Math.round(at.zoom)}×`; } };
  }

  /* Several images of one scene: slider between two, all side by side, or the residual of two. */
  function compare(first) {
    let picture = first, images = [], mode = "slider", split = 0.5, canvas = h("canvas"), bar = h("div", { class: "legend" });
    const last = () => picture.images.length - 1, output = () => (picture.images.length > 2 ? last() - 1 : last());
    const pairs = { slider: [0, output()], residual: [picture.images.length > 2 ? output() : 0, last()] };
    const stages = h("div"), slide = h("input", { class: "split", type: "range", min: 0, max: 100, step: 0.5, value: 50, "aria-label": "Divider between the two images" });
    const view = lens(layout), pickers = h("span", { class: "tools", style: "margin:0" });
    const modes = choice([["slider", "Slider"], ["side", "Side by side"], ["residual", "Residual"]], mode, (m) => { mode = m; build(); }, "How to compare");
    const tools = h("div", { class: "tools" }, modes, pickers, h("span", { class: "tools push", style: "margin-block:0" }, view.said, view.buttons));
    const node = h("div", { class: "compare" }, tools, stages);
    slide.addEventListener("input", () => { split = slide.value / 100; layout(); });

    function picker(which, title) {
      const select = h("select", { "aria-label": title, onchange: () => { pairs[mode][which] = +select.value; build(); } });
      picture.images.forEach((_, k) => select.append(h("option", { value: k, text: label(picture, k), selected: pairs[mode][which] === k })));
      return select;
    }
    function stage(...layers) {
      const slides = mode === "slider" && layers[0] !== canvas;
      const box = h("div", { class: "stage", tabindex: 0, role: "group", "aria-label": `${picture.caption}. Plus and minus zoom, arrows move.` }, ...layers);
      view.listen(box, slides ? (fx, begin) => {
        if (begin && view.at.zoom > 1 && Math.abs(fx - split) > 0.06) return false;  // zoomed in: only the divider itself, the rest pans
        split = Math.max(0, Math.min(1, fx));
        slide.value = split * 100;
        layout();
        return true;
      } : null);
      return box;
    }
    const shot = (k) => h("img", { src: picture.images[k], alt: label(picture, k), draggable: "false", "data-k": k });

    function build() {
      bar.replaceChildren();
      pickers.replaceChildren();
      if (mode === "side") {
        const n = picture.images.length, across = n <= 4 ? n : 3;
        stages.replaceChildren(h("div", { class: "panes", style: `grid-template-columns: repeat(${across}, minmax(0, 1fr))` },
          picture.images.map((_, k) => h("figure", {}, stage(shot(k)), h("figcaption", { text: label(picture, k) })))));
      } else if (mode === "slider") {  // and, where there is room, what the right image still gets wrong
        const [a, b] = pairs.slider;
        if (last() > 1) pickers.append(picker(0, "Left image"), "and", picker(1, "Right image"));
        const slider = stage(shot(b), h("div", { class: "layer over" }, shot(a)), h("span", { class: "tag left", text: label(picture, a) }), h("span", { class: "tag right", text: label(picture, b) }), h("div", { class: "divider" }));
        stages.replaceChildren(h("div", { class: "beside" }, h("div", {}, slider, slide), h("div", { class: "rest" }, stage(canvas), bar)));
        residual();
      } else {
        pickers.append(picker(0, "First image"), "minus", picker(1, "Second image"));
        stages.replaceChildren(stage(canvas), bar);
        residual();
      }
      layout();
    }
    function residual() {
      const chosen = mode === "residual" ? pairs.residual : [pairs.slider[1] === last() ? pairs.slider[0] : pairs.slider[1], last()], [a, b] = chosen.map((k) => images[k]);
      if (!a || !b) return;
      const w = b.naturalWidth, hgt = b.naturalHeight, p = pixels(a, w, hgt).data, q = pixels(b, w, hgt).data, n = w * hgt, error = new Float32Array(n);
      let square = 0, sum = 0;
      for (let i = 0; i < n; i++) {
        let e = 0;
        for (let c = 0; c < 3; c++) { const d = (p[4 * i + c] - q[4 * i + c]) / 255; e += Math.abs(d) / 3; square += d * d; }
        error[i] = e; sum += e;
      }
      const top = Math.max(4 / 255, Float32Array.from(error).sort()[Math.floor(n * 0.995)]);  // a few outliers must not darken everything
      paint(canvas, w, hgt, (i) => error[i] / top, scale("inferno"));
      const mse = square / (3 * n);
      const copies = chosen.some((k) => images[k].src.startsWith("data:image/webp")) ? " (compressed copies; the originals are in the run folder)" : "";
      bar.replaceChildren(colourBar("inferno", "0", number(top, 2)), h("span", { text: `|${label(picture, chosen[0])} − ${label(picture, chosen[1])}|, mean ${number(sum / n, 3)}` }), h("span", { text: mse ? `${number(-10 * Math.log10(mse), 4)} dB between these images${copies}` : "identical" }));
    }
    function layout() {
      const reference = images[last()] || images.find(Boolean), over = stages.querySelector(".over");
      if (!reference) return;
      const aspect = reference.naturalWidth / reference.naturalHeight;
      for (const box of stages.querySelectorAll(".stage")) {
        const room = box.parentElement.clientWidth;
        if (!room) continue;  // the residual, where there is no room beside the slider
        const tall = Math.min(innerHeight * 0.78, 640), small = Math.max(320, reference.naturalWidth * (reference.naturalWidth < 200 ? 4 : 2.5));
        const width = Math.min(room, tall * aspect, small), height = width / aspect;
        box.style.width = `${width}px`; box.style.height = `${height}px`;
        box.classList.toggle("zoomed", view.at.zoom > 1);
        for (const layer of box.querySelectorAll("img, canvas")) view.place(layer, width, height, layer.naturalWidth || layer.width);
        if (mode === "slider") { slide.style.width = `${width + 16}px`; slide.style.marginLeft = "-8px"; }
      }
      if (over) {
        over.style.clipPath = `inset(0 ${(100 - split * 100).toFixed(2)}% 0 0)`;
        stages.querySelector(".divider").style.left = `${split * 100}%`;
      }
      view.tell();
    }
    async function load() {
      images = await Promise.all(picture.images.map(loaded));
      if (mode !== "side") residual();
      layout();
    }
    build();
    load();
    Draw.onWidth(node, layout);
    return { node, update(next) { picture = next; build(); load(); } };
  }

  /* Frames of a video: a player, all frames, and one row of pixels over time. */
  function strip(first) {
    let picture = first, frames = [], now = 0, row = 0.5, timer = null;
    const big = h("img", { alt: "" }), line = h("div", { class: "row" }), frame = h("div", { class: "frame" }, big, line), profile = h("canvas", { class: "crisp", role: "img", "aria-label": "Temporal profile" });
    const play = h("button", { type: "button", text: "Play", onclick: () => (timer ? stop() : start()) });
    const time = h("input", { type: "range", min: 0, max: 0, value: 0, oninput: () => show(+time.value) }), height = h("input", { type: "range", min: 0, max: 100, value: 50, oninput: () => { row = height.value / 100; show(now); slice(); } });
    const thumbs = h("div", { class: "strip" });
    const node = h("div", {}, h("div", { class: "film" },
      h("div", {}, frame, h("div", { class: "tools" }, play, h("label", {}, "Frame", time))),
      h("div", {}, profile, h("div", { class: "small soft", style: "margin-top:6px", text: "Temporal profile: the dashed row in every frame, time downwards. Straight lines are still; jagged ones flicker." }), h("div", { class: "tools" }, h("label", {}, "Row", height)))), thumbs);
    frame.addEventListener("pointerdown", (e) => { const b = frame.getBoundingClientRect(); row = (e.clientY - b.top) / b.height; height.value = row * 100; show(now); slice(); });
    const start = () => { timer = setInterval(() => show((now + 1) % picture.images.length), 150); play.textContent = "Pause"; };
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "Play"; };
    function show(k) {
      now = k;
      time.value = k;
      big.src = picture.images[k];
      big.alt = label(picture, k);
      if (big.naturalWidth && big.clientWidth / big.naturalWidth >= 2.5) big.classList.add("crisp");
      line.style.top = `${row * 100}%`;
      [...thumbs.children].forEach((b, i) => b.setAttribute("aria-current", String(i === k)));
    }
    function slice() {
      const good = frames.filter(Boolean);
      if (!good.length) return;
      const width = good[0].naturalWidth, each = Math.max(1, Math.round((width * 0.62) / good.length));
      profile.width = width; profile.height = each * good.length;
      const ctx = profile.getContext("2d");
      ctx.imageSmoothingEnabled = false;
      good.forEach((img, t) => ctx.drawImage(img, 0, Math.min(img.naturalHeight - 1, Math.floor(row * img.naturalHeight)), img.naturalWidth, 1, 0, t * each, width, each));
    }
    async function load() {
      now = Math.min(now, picture.images.length - 1);
      time.max = picture.images.length - 1;
      thumbs.replaceChildren(...picture.images.map((src, k) => h("button", { type: "button", "aria-label": `Frame ${label(picture, k)}`, onclick: () => { stop(); show(k); } }, h("img", { src, alt: "" }))));
      show(now);
      frames = await Promise.all(picture.images.map(loaded));
      slice();
      show(now);
    }
    load();
    return { node, update(next) { picture = next; load(); } };
  }

  /* A closer look at one image, in a dialog. */
  function closeLook(src, title, canvas) {
    const body = h("div", { class: "inside" }), dialog = h("dialog", { class: "close-look", "aria-label": title, onclose: () => dialog.remove() }, body);
    const view = lens(layout), layer = canvas || h("img", { src, alt: title, draggable: "false" }), stage = h("div", { class: "stage", tabindex: 0 }, layer);
    function layout() {
      const w = layer.naturalWidth || layer.width, hgt = layer.naturalHeight || layer.height;
      if (!w) return;
      const width = Math.min(body.clientWidth - 36, (innerHeight * 0.76 * w) / hgt), height = (width * hgt) / w;
      stage.style.width = `${width}px`; stage.style.height = `${height}px`;
      stage.classList.toggle("zoomed", view.at.zoom > 1);
      view.place(layer, width, height, w);
      view.tell();
    }
    body.append(h("div", { class: "tools" }, h("b", { text: title }), h("span", { class: "tools push", style: "margin:0 0 0 auto" }, view.said, view.buttons, h("button", { type: "button", text: "Close", autofocus: true, onclick: () => dialog.close() }))), stage);
    view.listen(stage, null);
    layer.addEventListener("load", layout);
    dialog.addEventListener("click", (e) => e.target === dialog && dialog.close());
    document.body.append(dialog);
    dialog.showModal();
    layout();
  }
  function still(src, text) {
    const img = h("img", { src, alt: text, onload: () => {
      const aspect = img.naturalWidth / img.naturalHeight;
      img.classList.toggle("crisp", img.naturalWidth < 100);
      img.classList.toggle("odd", aspect < 0.5 || aspect > 2.5);  // a strip of pixels must not take the page
    } });
    return h("figure", {}, h("button", { type: "button", class: "look", "aria-label": `Look closer: ${text || "image"}`, onclick: () => closeLook(src, text || "image") }, img), text && h("figcaption", { text }));
  }
  const FOLD = 24;  // images of a sheet that are shown before the reader asks for more
  function sheet(first, large) {
    let whole = false, picture = first;
    const images = h("div"), more = h("button", { type: "button", class: "more", onclick: () => { whole = !whole; draw(); } }), node = h("div", {}, images, more);
    function draw() {
      const all = picture.images.length, shown = whole || all <= FOLD + 6 ? all : FOLD;
      images.className = large ? "sheet large" : all < 8 ? "sheet few" : "sheet";
      images.replaceChildren(...picture.images.slice(0, shown).map((src, k) => still(src, label(picture, k))));
      more.hidden = all <= FOLD + 6;
      more.textContent = whole ? `Show only ${FOLD}` : `Show all ${all}`;
      more.setAttribute("aria-expanded", String(whole));
    }
    draw();
    return { node, update(next) { picture = next; draw(); } };
  }

  /* One channel under a colour scale; signed values get one that is white at zero. */
  function map(first) {
    const node = h("div", { class: "sheet large" });
    function update(picture) {
      node.replaceChildren(...picture.images.map((src, k) => {
        const range = Array.isArray(picture.ranges[k]) ? picture.ranges[k] : null, signed = range && range[0] < 0 && range[1] > 0, name = signed ? "signed" : "viridis";
        const size = signed ? Math.max(-range[0], range[1]) : 0, canvas = h("canvas"), said = h("span"), text = label(picture, k) || picture.caption;
        const value = (v) => (range ? range[0] + v * (range[1] - range[0]) : v);
        loaded(src).then((img) => {
          if (!img) return;
          const data = pixels(img).data, w = img.naturalWidth, at = (i) => data[4 * i] / 255;
          paint(canvas, w, img.naturalHeight, (i) => (signed ? 0.5 + value(at(i)) / (2 * size) : at(i)), scale(name));
          canvas.classList.toggle("crisp", w < 200);
          canvas.addEventListener("pointermove", (e) => {
            const b = canvas.getBoundingClientRect(), x = Math.floor(((e.clientX - b.left) / b.width) * w), y = Math.floor(((e.clientY - b.top) / b.height) * img.naturalHeight);
            said.textContent = range ? `${number(value(at(y * w + x)), 3)} at (${x}, ${y})` : "";
          });
        });
        const copy = () => { const c = h("canvas", { width: canvas.width, height: canvas.height }); c.getContext("2d").drawImage(canvas, 0, 0); closeLook(null, text, c); };
        const ends = signed ? [-size, size] : range;
        return h("figure", {}, h("button", { type: "button", class: "look", "aria-label": `Look closer: ${text}`, onclick: copy }, canvas),
          h("div", { class: "legend" }, colourBar(name, ends ? number(ends[0], 3) : "low", ends ? number(ends[1], 3) : "high"), said), picture.labels[k] && h("figcaption", { text }));
      }));
    }
    update(first);
    return { node, update };
  }

  /* A map that brings its classes and counts is a confusion matrix: drawn with names, read cell by cell. */
  function confusion(first) {
    const data = (p) => {
      const { classes, counts } = p.facts, sums = counts.map((row) => row.reduce((a, b) => a + b, 0));
      return { label: p.caption, rows: classes, columns: classes, square: true, rest: "Rows are the truth, columns the prediction; the stronger the colour, the larger the share of its row.",
        cell: (r, c) => ({ t: sums[r] ? counts[r][c] / sums[r] : null }), say: (r, c) => `${classes[r]} taken for ${classes[c]}: ${number(counts[r][c])} of ${number(sums[r])} (${number((100 * counts[r][c]) / (sums[r] || 1), 3)} %)` };
    };
    const grid = Draw.matrix(data(first));
    return { node: grid.node, update: (p) => grid.update(data(p)) };
  }
  const isConfusion = ({ facts: { classes, counts } }) => Array.isArray(classes) && Array.isArray(counts) && counts.length === classes.length && counts.every((row) => Array.isArray(row) && row.length === classes.length);

  const KINDS = { compare: (p) => (p.images.length > 1 ? compare(p) : sheet(p, true)), strip: (p) => (p.images.length > 1 ? strip(p) : sheet(p, true)), sheet, map: (p) => (isConfusion(p) ? confusion(p) : map(p)), image: (p) => sheet(p, true) };
  function one(picture) {
    const title = h("h3"), chips = h("div", { class: "chips" }), part = (KINDS[picture.kind] || KINDS.image)(picture);
    const half = picture.images.length === 1 && picture.kind !== "sheet" ? " half" : "";
    const node = h("figure", { class: `picture${half}`, "data-kind": picture.kind }, h("figcaption", {}, title, chips), part.node);
    function head(p) {
      title.textContent = p.caption;
      const flat = Object.entries(p.facts).flatMap(([k, v]) => (v && typeof v === "object" && !Array.isArray(v) ? Object.entries(v).map(([j, x]) => [`${words(k)}: ${words(j)}`, x]) : [[words(k), v]]));
      chips.replaceChildren(...flat.filter(([, v]) => v !== null && typeof v !== "object").map(([k, v]) => h("span", {}, `${k} `, h("b", { class: "num", text: typeof v === "number" ? number(v) : String(v) }))));
    }
    head(picture);
    return { node, kind: picture.kind, count: picture.images.length, update(next) { head(next); part.update(next); } };
  }

  /* All pictures of a run; those whose images did not change are left alone. */
  function gallery() {
    const node = h("div", { class: "pictures" });
    let parts = [], shown = [];
    function update(pictures) {
      const same = parts.length === pictures.length && parts.every((p, k) => p.kind === pictures[k].kind && p.count === pictures[k].images.length);
      if (!same) { parts = pictures.map(one); node.replaceChildren(...parts.map((p) => p.node)); }
      else parts.forEach((p, k) => JSON.stringify(pictures[k]) !== shown[k] && p.update(pictures[k]));
      shown = pictures.map((p) => JSON.stringify(p));
    }
    return { node, update };
  }
  return { gallery, isConfusion };
})();
